// A processor in place of the GPU: what machine.cuh needs in plain C++, with every access checked.
#pragma once

#include <cstring>
#include <ctime>
#include <sched.h>
#include <vector>

#define DEVICE inline
#define KERNEL(name, Arguments) extern "C" void name(const Arguments arguments)
#define UNROLL
#define ROLL

struct Place {
    u32 thread, threads, block, blocks;
};
struct Range {
    u64 begin, end;
};
// Each thread of the processor may be another GPU.
extern thread_local Place place;
extern thread_local std::vector<Range> readable, writable;
// Accesses that a GPU would not have liked.
extern thread_local u64 faults;

DEVICE u32 thread() { return place.thread; }
DEVICE u32 threads() { return place.threads; }
DEVICE u32 block() { return place.block; }
DEVICE u32 blocks() { return place.blocks; }

// The threads run one after the other, so that each has to look for itself.
u32 looked_up_by_first_thread(u32 mine);
DEVICE bool any_in_block(u32 mine) { return (looked_up_by_first_thread(mine) | mine) != 0; }

template <class To, class From> static inline To with_bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "as large");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
DEVICE float as_float(u32 bits) { return with_bits_of<float>(bits); }
DEVICE u32 as_bits(float x) { return with_bits_of<u32>(x); }
DEVICE double as_double(u64 bits) { return with_bits_of<double>(bits); }
DEVICE u64 as_bits(double x) { return with_bits_of<u64>(x); }

DEVICE float add(float a, float b) { return a + b; }
DEVICE float subtract(float a, float b) { return a - b; }
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE double add(double a, double b) { return a + b; }
DEVICE double subtract(double a, double b) { return a - b; }
DEVICE double multiply(double a, double b) { return a * b; }
DEVICE double divide(double a, double b) { return a / b; }

DEVICE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEVICE u32 shift_pair(u32 low, u32 high, u32 bits) { return (u32)((low | (u64)high << 32) >> bits); }

DEVICE float half_to_float(u32 code) {
    float x = multiply(as_float((code & 0x7fff) << 13), as_float((127 - 15 + 127) << 23));
    u32 special = (code & 0x7fff) >= 0x7c00 ? 0x7f800000 : 0;
    return as_float(as_bits(x) | special | (code & 0x8000) << 16);
}

// By looking for the nearest of all halves.
u32 float_to_half(float x);
DEVICE u32 floats_to_halves(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }

DEVICE u32 float_to_bfloat(float x) {
    if (x != x) return 0x7fff;
    u32 bits = as_bits(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 floats_to_bfloats(float low, float high) { return float_to_bfloat(low) | float_to_bfloat(high) << 16; }

DEVICE u32 load_shared_with_host(u64 from) {
    u32 word;
    memcpy(&word, (const void *)from, sizeof word);
    return word;
}

DEVICE void store_shared_with_host(u64 to, u32 word) { __atomic_store_n((u32 *)to, word, __ATOMIC_RELEASE); }

DEVICE u64 load_shared_with_all(u64 from) { return __atomic_load_n((const u64 *)from, __ATOMIC_RELAXED); }
DEVICE void store_shared_with_all(u64 to, u64 word) { __atomic_store_n((u64 *)to, word, __ATOMIC_RELAXED); }
DEVICE u64 swap_zero_shared_with_all(u64 at, u64 word) {
    u64 before = 0;
    __atomic_compare_exchange_n((u64 *)at, &before, word, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return before;
}
DEVICE void release_to_all(u64 to, u64 word) { __atomic_store_n((u64 *)to, word, __ATOMIC_RELEASE); }
DEVICE u64 acquire_from_all(u64 from) {
    // Who is waited for may need this core.
    sched_yield();
    return __atomic_load_n((const u64 *)from, __ATOMIC_ACQUIRE);
}
DEVICE u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000 + (u64)now.tv_nsec;
}

// The blocks run one after the other.
#define SHARED_BY_BLOCKS static
DEVICE u64 raise_shared(u64 *word, u64 to) {
    u64 before = *word;
    if (before < to) *word = to;
    return before;
}
DEVICE u64 load_shared(const u64 *word) { return *word; }

static inline bool allowed(const std::vector<Range> &ranges, u64 address, u64 size) {
    bool inside = false;
    for (const Range &range : ranges) inside |= range.begin <= address && address + size <= range.end;
    bool fine = inside && address % size == 0;
    faults += !fine;
    return fine;
}

template <class Word> static inline void load(Word &into, u64 from, bool wanted) {
    into = Word();
    if (wanted && allowed(readable, from, sizeof into)) memcpy(&into, (const void *)from, sizeof into);
}
template <class Word> static inline void load_cached(Word &into, u64 from, bool wanted) { load(into, from, wanted); }

template <class Word> static inline void store(u64 to, const Word &from, bool wanted) {
    if (wanted && allowed(writable, to, sizeof from)) memcpy((void *)to, &from, sizeof from);
}
