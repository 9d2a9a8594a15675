// The operations, on widened elements. `enter` is done to each input and `leave` once to the result.
#pragma once

#include "arguments.cuh"
#include "elements.cuh"

struct Plain {
    template <class T, class Arguments> static DEVICE int factor(const Arguments &) { return 0; }
    template <class T> static DEVICE typename T::Wide enter(typename T::Wide x, int) { return x; }
    template <class T> static DEVICE typename T::Wide leave(typename T::Wide x, int) { return x; }
};

DEVICE u32 add(u32 a, u32 b) { return a + b; }
DEVICE u64 add(u64 a, u64 b) { return a + b; }
DEVICE u32 multiply(u32 a, u32 b) { return a * b; }
DEVICE u64 multiply(u64 a, u64 b) { return a * b; }
template <class Number> DEVICE Complex<Number> multiply(Complex<Number> a, Complex<Number> b) {
    return {subtract(multiply(a.real, b.real), multiply(a.imaginary, b.imaginary)),
            add(multiply(a.real, b.imaginary), multiply(a.imaginary, b.real))};
}

struct Sum : Plain {
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return add(a, b); }
};

struct Product : Plain {
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return multiply(a, b); }
};

// Of equal ones the first. Only NaN differs from itself.
struct Min : Plain {
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return b < a || b != b ? b : a; }
};

struct Max : Plain {
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return b > a || b != b ? b : a; }
};

struct And : Plain {
    static DEVICE u32 combine(u32 a, u32 b) { return a & b; }
};

struct Or : Plain {
    static DEVICE u32 combine(u32 a, u32 b) { return a | b; }
};

struct Xor : Plain {
    static DEVICE u32 combine(u32 a, u32 b) { return a ^ b; }
};

// The sum, divided at the end by the number of inputs.
struct Avg {
    template <class T, class Arguments> static DEVICE typename T::Wide factor(const Arguments &arguments) {
        return (typename T::Wide)arguments.inputs;
    }
    template <class T> static DEVICE typename T::Wide enter(typename T::Wide x, typename T::Wide) { return x; }
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return add(a, b); }
    template <class T> static DEVICE typename T::Wide leave(typename T::Wide x, typename T::Wide inputs) {
        return divide(x, inputs);
    }
};

// The sum of products that were each rounded to the element type.
struct PremulSum {
    template <class T, class Arguments> static DEVICE typename T::Wide factor(const Arguments &arguments) {
        return (typename T::Wide)arguments.factor;
    }
    template <class T> static DEVICE typename T::Wide enter(typename T::Wide x, typename T::Wide factor) {
        return T::widen(T::narrow(multiply(x, factor)));
    }
    template <class Wide> static DEVICE Wide combine(Wide a, Wide b) { return add(a, b); }
    template <class T> static DEVICE typename T::Wide leave(typename T::Wide x, typename T::Wide) { return x; }
};
