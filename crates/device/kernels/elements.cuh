// How each element type is widened before it is combined, and rounded once afterwards.
//
// A type has SIZE bytes in memory. A pack of them is taken in LANES parts; `Code` is the bits of one, `Wide` what it is
// combined as. What every conversion must give is told at ReduceOp (src/op.rs).
#pragma once

#include "machine.cuh"

// Bits of an element, by size. Of sixteen bytes it is the pack itself.
template <int SIZE> struct Bits;
template <> struct Bits<1> { typedef u8 Memory; typedef u32 Code; };
template <> struct Bits<2> { typedef u16 Memory; typedef u32 Code; };
template <> struct Bits<4> { typedef u32 Memory; typedef u32 Code; };
template <> struct Bits<8> { typedef u64 Memory; typedef u64 Code; };
template <> struct Bits<16> { typedef Pack Memory; typedef Pack Code; };

template <class Number> struct Complex {
    Number real;
    Number imaginary;
};

template <int size, class Number> struct Integer {
    static constexpr int SIZE = size, LANES = 16 / size;
    typedef Number Wide;
    typedef typename Bits<size>::Code Code;

    static DEVICE Wide widen(Code code) {
        // Signed ones are extended from their upper bit.
        constexpr int UNUSED = 8 * (int)(sizeof(Code) - size);
        return (Number)(code << UNUSED) >> UNUSED;
    }
    static DEVICE Code narrow(Wide x) { return (Code)x & (Code)-1 >> 8 * (sizeof(Code) - size); }
};
typedef Integer<1, int> I8;
typedef Integer<2, int> I16;
typedef Integer<4, int> I32;
typedef Integer<8, i64> I64;
typedef Integer<1, u32> U8;
typedef Integer<2, u32> U16;
typedef Integer<4, u32> U32;
typedef Integer<8, u64> U64;

// Bits have no type: as bytes, or four at a time.
struct Raw {
    static constexpr int SIZE = 1, LANES = 4;
    typedef u32 Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) { return code; }
    static DEVICE Code narrow(Wide x) { return x; }
};

// A byte that is true unless it is zero, and is stored as 0 or 1. Also four at a time.
struct Bool : Raw {
    static DEVICE Wide widen(Code code) {
        // Any bit but the upper one carries into that one, and never further.
        u32 carried = (code & 0x7f7f7f7f) + 0x7f7f7f7f;
        return (carried | code) >> 7 & 0x01010101;
    }
};

struct F32 {
    static constexpr int SIZE = 4, LANES = 4;
    typedef float Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) { return as_float(code); }
    static DEVICE Code narrow(Wide x) { return as_bits(x); }
};

struct F64 {
    static constexpr int SIZE = 8, LANES = 2;
    typedef double Wide;
    typedef u64 Code;

    static DEVICE Wide widen(Code code) { return as_double(code); }
    static DEVICE Code narrow(Wide x) { return as_bits(x); }
};

struct F16 {
    static constexpr int SIZE = 2, LANES = 8;
    typedef float Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) { return half_to_float(code); }
    static DEVICE Code narrow(Wide x) { return floats_to_halves(x, 0.0f); }
    static DEVICE u32 narrow_two(Wide low, Wide high) { return floats_to_halves(low, high); }
};

struct Bf16 {
    static constexpr int SIZE = 2, LANES = 8;
    typedef float Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) { return as_float(code << 16); }
    static DEVICE Code narrow(Wide x) { return floats_to_bfloats(x, 0.0f); }
    static DEVICE u32 narrow_two(Wide low, Wide high) { return floats_to_bfloats(low, high); }
};

// Eight bits: a sign, an exponent and a mantissa, with subnormal numbers. SPECIAL is the first code that is not finite,
// MOST what becomes of what is too large, NAN_BITS what makes a NaN of it. FNUZ: the only NaN is the code where others have
// their negative zero.
template <int MANTISSA, int BIAS, u32 SPECIAL, u32 MOST, u32 NAN_BITS, bool FNUZ> struct Small {
    static constexpr int SIZE = 1, LANES = 16;
    typedef float Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) {
        u32 magnitude = code & 0x7f;
        // A multiplication corrects the exponent for normal and subnormal numbers alike.
        float scaled = multiply(as_float(magnitude << (23 - MANTISSA)), as_float((127 - BIAS + 127) << 23));
        u32 special = FNUZ ? (code == SPECIAL ? 0x7fc00000 : 0) : (magnitude >= SPECIAL ? 0x7f800000 : 0);
        return as_float(as_bits(scaled) | special | (code & 0x80) << 24);
    }

    static DEVICE Code narrow(Wide x) {
        constexpr u32 DROP = 23 - MANTISSA, REBIAS = (u32)(127 - BIAS) << 23, LARGEST = (MOST << DROP) + REBIAS;
        u32 magnitude = as_bits(x) & 0x7fffffff;
        u32 nan = magnitude > 0x7f800000 ? NAN_BITS : 0;
        magnitude = magnitude < LARGEST ? magnitude : LARGEST;
        // To the nearest, ties to even; a carry runs into the exponent.
        u32 normal = (magnitude + ((1u << (DROP - 1)) - 1) + (magnitude >> DROP & 1) - REBIAS) >> DROP;
        // The unit of `shift` is the smallest subnormal number, so that the addition rounds.
        constexpr u32 SHIFT = REBIAS + ((1 + DROP) << 23);
        u32 subnormal = as_bits(add(as_float(magnitude), as_float(SHIFT))) - SHIFT;
        u32 code = (magnitude < REBIAS + (1u << 23) ? subnormal : normal) | nan;
        // Without a negative zero, neither zero nor what is not finite has a sign.
        if (FNUZ && code >= SPECIAL) return SPECIAL;
        if (FNUZ && code == 0) return 0;
        return code | as_bits(x) >> 31 << 7;
    }
};
typedef Small<3, 7, 0x7f, 0x7e, 1, false> F8E4M3Fn;
typedef Small<2, 15, 0x7c, 0x7c, 3, false> F8E5M2;
typedef Small<3, 8, 0x80, 0x80, 0x80, true> F8E4M3Fnuz;
typedef Small<2, 16, 0x80, 0x80, 0x80, true> F8E5M2Fnuz;

// A power of two: 2^(code - 127), or NaN for the last code.
struct F8E8M0Fnu {
    static constexpr int SIZE = 1, LANES = 16;
    typedef float Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) {
        // The first is subnormal as an f32. The last would be infinity without the same bit.
        return as_float(code << 23 | (code == 0 || code == 0xff ? 1u << 22 : 0));
    }

    // A tie goes up. Of a subnormal number the bit of one half must not stand alone: what is larger than the smallest
    // power becomes the next one.
    static DEVICE Code narrow(Wide x) {
        u32 magnitude = as_bits(x) & 0x7fffffff;
        u32 code = (magnitude + (1u << 22) - 1 + (magnitude >= 1u << 23)) >> 23;
        return x < 0.0f || code > 0xff ? 0xff : code;
    }
};

struct Complex32 {
    static constexpr int SIZE = 4, LANES = 4;
    typedef Complex<float> Wide;
    typedef u32 Code;

    static DEVICE Wide widen(Code code) { return {half_to_float(code & 0xffff), half_to_float(code >> 16)}; }
    static DEVICE Code narrow(Wide x) { return floats_to_halves(x.real, x.imaginary); }
};

struct Complex64 {
    static constexpr int SIZE = 8, LANES = 2;
    typedef Complex<float> Wide;
    typedef u64 Code;

    static DEVICE Wide widen(Code code) { return {as_float((u32)code), as_float((u32)(code >> 32))}; }
    static DEVICE Code narrow(Wide x) { return as_bits(x.real) | (u64)as_bits(x.imaginary) << 32; }
};

struct Complex128 {
    static constexpr int SIZE = 16, LANES = 1;
    typedef Complex<double> Wide;
    typedef Pack Code;

    static DEVICE Wide widen(const Code &code) {
        return {as_double(code.words[0] | (u64)code.words[1] << 32), as_double(code.words[2] | (u64)code.words[3] << 32)};
    }
    static DEVICE Code narrow(Wide x) {
        u64 real = as_bits(x.real), imaginary = as_bits(x.imaginary);
        return {{(u32)real, (u32)(real >> 32), (u32)imaginary, (u32)(imaginary >> 32)}};
    }
};

// A pack as its parts, and back.
template <class T, int LANES = T::LANES> struct Lanes;

template <class T> struct Lanes<T, 16> {
    static DEVICE typename T::Wide widen(const Pack &pack, int i) {
        return T::widen(pack.words[i / 4] >> 8 * (i % 4) & 0xff);
    }
    static DEVICE u32 word(const typename T::Wide (&wide)[16], int i) {
        return T::narrow(wide[4 * i]) | T::narrow(wide[4 * i + 1]) << 8 | T::narrow(wide[4 * i + 2]) << 16 |
               T::narrow(wide[4 * i + 3]) << 24;
    }
    static DEVICE Pack narrow(const typename T::Wide (&wide)[16]) {
        return {{word(wide, 0), word(wide, 1), word(wide, 2), word(wide, 3)}};
    }
};

template <int SIZE, class Number> DEVICE u32 narrow_two(Integer<SIZE, Number>, Number low, Number high) {
    return ((u32)low & 0xffff) | (u32)high << 16;
}
template <class T> DEVICE u32 narrow_two(T, typename T::Wide low, typename T::Wide high) {
    return T::narrow_two(low, high);
}

template <class T> struct Lanes<T, 8> {
    static DEVICE typename T::Wide widen(const Pack &pack, int i) {
        return T::widen(pack.words[i / 2] >> 16 * (i % 2) & 0xffff);
    }
    static DEVICE Pack narrow(const typename T::Wide (&wide)[8]) {
        return {{narrow_two(T(), wide[0], wide[1]), narrow_two(T(), wide[2], wide[3]),
                 narrow_two(T(), wide[4], wide[5]), narrow_two(T(), wide[6], wide[7])}};
    }
};

template <class T> struct Lanes<T, 4> {
    static DEVICE typename T::Wide widen(const Pack &pack, int i) { return T::widen(pack.words[i]); }
    static DEVICE Pack narrow(const typename T::Wide (&wide)[4]) {
        return {{T::narrow(wide[0]), T::narrow(wide[1]), T::narrow(wide[2]), T::narrow(wide[3])}};
    }
};

template <class T> struct Lanes<T, 2> {
    static DEVICE typename T::Wide widen(const Pack &pack, int i) {
        return T::widen(pack.words[2 * i] | (u64)pack.words[2 * i + 1] << 32);
    }
    static DEVICE Pack narrow(const typename T::Wide (&wide)[2]) {
        u64 first = T::narrow(wide[0]), second = T::narrow(wide[1]);
        return {{(u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32)}};
    }
};

template <class T> struct Lanes<T, 1> {
    static DEVICE typename T::Wide widen(const Pack &pack, int) { return T::widen(pack); }
    static DEVICE Pack narrow(const typename T::Wide (&wide)[1]) { return T::narrow(wide[0]); }
};
