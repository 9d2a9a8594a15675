// What the kernels are called with: twins of the structs in src/cuda/kernels/arguments.rs.
#pragma once

#include "machine.cuh"

// As many spans can be inputs, and as many outputs.
#define MOST_SPANS 128
// One more than a tensor has: an element that is not aligned is a dimension too.
#define MOST_DIMS 9

struct ReduceArguments {
    // Addresses of u32 that tell the kernel to write nothing unless they are zero; or 0.
    u64 abort[2];
    // Elements in each span.
    u64 count;
    // Elements before the first pack, and packs after them; no packs where the spans lie differently.
    u64 head;
    u64 packs;
    // What ReduceOp::PremulSum multiplies by.
    double factor;
    u32 inputs;
    u32 outputs;
    // Not zero where elements may lie at any address, and not only at multiples of their size.
    u32 loose;
    u32 unused;
    u64 input[MOST_SPANS];
    u64 output[MOST_SPANS];
};

struct CopyArguments {
    u64 abort[2];
    u64 to;
    u64 from;
    u64 bytes;
};

// One dimension, the innermost first. Division by `size` is a multiplication, an addition and a shift; it is right for
// less than 2^31.
struct Dim {
    u64 size;
    i64 to;
    i64 from;
    u32 multiplier;
    u32 shift;
};

struct StridedArguments {
    u64 abort[2];
    u64 to;
    u64 from;
    // Elements.
    u64 count;
    u32 dims;
    u32 unused;
    Dim dim[MOST_DIMS];
};

// NVRTC has no offsetof; the plain C++ compiler, which lays them out in the same way, checks for both.
#ifdef __CUDACC__
#define OFFSET(Struct, field, offset) static_assert(true, #field)
#else
#define OFFSET(Struct, field, offset) static_assert(__builtin_offsetof(Struct, field) == offset, #field)
#endif

static_assert(sizeof(ReduceArguments) == 2112, "ReduceArguments");
OFFSET(ReduceArguments, count, 16);
OFFSET(ReduceArguments, packs, 32);
OFFSET(ReduceArguments, factor, 40);
OFFSET(ReduceArguments, inputs, 48);
OFFSET(ReduceArguments, loose, 56);
OFFSET(ReduceArguments, input, 64);
OFFSET(ReduceArguments, output, 1088);
static_assert(sizeof(CopyArguments) == 40, "CopyArguments");
OFFSET(CopyArguments, to, 16);
OFFSET(CopyArguments, bytes, 32);
static_assert(sizeof(Dim) == 32, "Dim");
OFFSET(Dim, multiplier, 24);
static_assert(sizeof(StridedArguments) == 336, "StridedArguments");
OFFSET(StridedArguments, count, 32);
OFFSET(StridedArguments, dims, 40);
OFFSET(StridedArguments, dim, 48);
