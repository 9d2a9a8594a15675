// What the kernels need of the machine: types, exact arithmetic, memory and the place of a thread in its grid.
//
// The sources also compile as plain C++: tests/kernels/machine.cpp runs them thread by thread on a processor, where every
// access is checked. No kernel shares memory between its threads, but for the words of gate.cuh and meeting.cuh.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Sixteen bytes as they travel.
struct Pack {
    u32 words[4];
};

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
// At most so many threads in a block; three such blocks fit on a multiprocessor.
#define KERNEL(name, Arguments) \
    extern "C" __global__ void __launch_bounds__(256, 3) name(const __grid_constant__ Arguments arguments)
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }
// Whether any thread of the block says so. All of them must ask.
DEVICE bool any_in_block(u32 mine) { return __syncthreads_or(mine) != 0; }

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE double as_double(u64 bits) { return __longlong_as_double((i64)bits); }
DEVICE u64 as_bits(double x) { return (u64)__double_as_longlong(x); }

// Rounded to the nearest and never joined to one operation.
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float subtract(float a, float b) { return __fsub_rn(a, b); }
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
DEVICE double subtract(double a, double b) { return __dsub_rn(a, b); }
DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }
DEVICE double divide(double a, double b) { return __ddiv_rn(a, b); }

DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
// The lower word of both after a shift to the right by so many bits, less than 32.
DEVICE u32 shift_pair(u32 low, u32 high, u32 bits) { return __funnelshift_r(low, high, bits); }

DEVICE float half_to_float(u32 code) {
    float x;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(code));
    return x;
}

// Two at once: `low` becomes the lower half of the word.
DEVICE u32 floats_to_halves(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE u32 floats_to_bfloats(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// A word of the host's memory that its threads may be writing.
DEVICE u32 load_shared_with_host(u64 from) {
    u32 word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}

DEVICE void store_shared_with_host(u64 to, u32 word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}

// Words that kernels of other processes read and write while this one runs.
DEVICE u64 load_shared_with_all(u64 from) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

DEVICE void store_shared_with_all(u64 to, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}

// Writes a word where it is zero, and gives what it was before.
DEVICE u64 swap_zero_shared_with_all(u64 at, u64 word) {
    u64 before;
    asm volatile("atom.sys.global.cas.b64 %0, [%1], %2, %3;" : "=l"(before) : "l"(at), "l"(0ull), "l"(word) : "memory");
    return before;
}

// Whoever acquires the word sees what was written before it was released.
DEVICE void release_to_all(u64 to, u64 word) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}

DEVICE u64 acquire_from_all(u64 from) {
    u64 word;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Memory of the module, which is zero at first, and which all blocks see.
#define SHARED_BY_BLOCKS __device__

// Raises a word that blocks share, unless it is as large already. Gives what it was before.
DEVICE u64 raise_shared(u64 *word, u64 to) { return atomicMax(word, to); }

DEVICE u64 load_shared(const u64 *word) {
    u64 value;
    asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Loads: of zeros where `wanted` is false, without a branch, so that several are on their way at once. Nothing here is
// read twice, so that it need not stay in the caches.
DEVICE void load(Pack &into, u64 from, bool wanted) {
    into = Pack();
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(into.words[0]), "+r"(into.words[1]), "+r"(into.words[2]), "+r"(into.words[3])
                 : "l"(from), "r"((u32)wanted));
}

DEVICE void load(u64 &into, u64 from, bool wanted) {
    into = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cs.u64 %0, [%1]; }"
                 : "+l"(into) : "l"(from), "r"((u32)wanted));
}

DEVICE void load(u32 &into, u64 from, bool wanted) {
    into = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cs.u32 %0, [%1]; }"
                 : "+r"(into) : "l"(from), "r"((u32)wanted));
}

DEVICE void load(u16 &into, u64 from, bool wanted) {
    into = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cs.u16 %0, [%1]; }"
                 : "+h"(into) : "l"(from), "r"((u32)wanted));
}

DEVICE void load(u8 &into, u64 from, bool wanted) {
    u32 byte = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cs.u8 %0, [%1]; }"
                 : "+r"(byte) : "l"(from), "r"((u32)wanted));
    into = (u8)byte;
}

// A word that its neighbours in the block read too.
DEVICE void load_cached(u32 &into, u64 from, bool wanted) {
    into = 0;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                 : "+r"(into) : "l"(from), "r"((u32)wanted));
}

DEVICE void store(u64 to, const Pack &from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
                 :: "l"(to), "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]),
                    "r"((u32)wanted) : "memory");
}

DEVICE void store(u64 to, u64 from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u64 [%0], %1; }"
                 :: "l"(to), "l"(from), "r"((u32)wanted) : "memory");
}

DEVICE void store(u64 to, u32 from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1; }"
                 :: "l"(to), "r"(from), "r"((u32)wanted) : "memory");
}

DEVICE void store(u64 to, u16 from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u16 [%0], %1; }"
                 :: "l"(to), "h"(from), "r"((u32)wanted) : "memory");
}

DEVICE void store(u64 to, u8 from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u8 [%0], %1; }"
                 :: "l"(to), "r"((u32)from), "r"((u32)wanted) : "memory");
}

#else
#include "machine.hpp"
#endif
