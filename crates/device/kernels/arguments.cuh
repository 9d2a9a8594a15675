// What the kernels are called with: twins of the structs in src/cuda/kernels/arguments.rs.
#pragma once

#include "machine.cuh"

// As many spans can be inputs, and as many outputs.
#define MOST_SPANS 128
// One more than a tensor has: an element that is not aligned is a dimension too.
#define MOST_DIMS 9
// As many copies are made by one launch.
#define MOST_COPIES 64
// As many streams have a place where one block of a launch tells the others what it has read.
#define MOST_GATES 1024

// What every kernel looks at before it writes.
struct GateArguments {
    // Addresses of u32 that tell the kernel to write nothing unless they are zero; or 0.
    u64 abort[2];
    // The number of this launch among those with the same place, from 1 on.
    u64 launch;
    // From MOST_GATES on there is none, and every block reads for itself.
    u32 place;
    u32 unused;
    // Where each block writes when it ends, or 0: the nanoseconds of the GPU's clock, and so many more.
    u64 stamp;
    u64 offset;
};

// Where the blocks of several ranks' kernels wait for each other.
struct MeetingArguments {
    // Addresses of u32 in the host's memory: the words that end meetings, or 0; and where is written how one has failed. The
    // first word is set if it was too late.
    u64 abort[2];
    u64 failure;
    // Nanoseconds that a block waits for others.
    u64 timeout;
    // Bytes from the words of the channel back to those that end all meetings, and bytes of a block's row.
    u64 back;
    u32 row;
    u32 channel;
    // How many ranks there are, or 0 where nobody meets; and this one.
    u32 ranks;
    u32 rank;
    // Addresses of the words that each rank has for this channel.
    u64 words[MOST_SPANS];
};

struct ReduceArguments {
    GateArguments gate;
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

struct TogetherArguments {
    ReduceArguments reduce;
    MeetingArguments meeting;
};

// Each row of the output is made of rows that lie anywhere.
struct RowsArguments {
    GateArguments gate;
    u64 output;
    // Addresses of a u32 for each row of the output, which counts the sources up to its last one, and of the u64 that are the
    // addresses of these.
    u64 ends;
    u64 sources;
    // Rows of the output, and the packs or elements of one.
    u64 rows;
    u64 items;
    // As in ReduceArguments; an average is divided by `inputs`.
    double factor;
    u32 inputs;
    // Whether rows are whole packs, at addresses of packs.
    u32 packed;
    u32 loose;
    u32 unused;
};

struct Copy {
    u64 to;
    u64 from;
    u64 bytes;
};

struct CopyArguments {
    GateArguments gate;
    u32 copies;
    u32 unused;
    Copy copy[MOST_COPIES];
    // The blocks of each copy end here; those of the next one begin.
    u32 end[MOST_COPIES];
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
    GateArguments gate;
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

static_assert(sizeof(GateArguments) == 48, "GateArguments");
OFFSET(GateArguments, launch, 16);
OFFSET(GateArguments, place, 24);
OFFSET(GateArguments, stamp, 32);
static_assert(sizeof(MeetingArguments) == 1080, "MeetingArguments");
OFFSET(MeetingArguments, failure, 16);
OFFSET(MeetingArguments, back, 32);
OFFSET(MeetingArguments, row, 40);
OFFSET(MeetingArguments, ranks, 48);
OFFSET(MeetingArguments, words, 56);
static_assert(sizeof(ReduceArguments) == 2144, "ReduceArguments");
OFFSET(ReduceArguments, count, 48);
OFFSET(ReduceArguments, packs, 64);
OFFSET(ReduceArguments, factor, 72);
OFFSET(ReduceArguments, inputs, 80);
OFFSET(ReduceArguments, loose, 88);
OFFSET(ReduceArguments, input, 96);
OFFSET(ReduceArguments, output, 1120);
static_assert(sizeof(TogetherArguments) == 3224, "TogetherArguments");
OFFSET(TogetherArguments, meeting, 2144);
static_assert(sizeof(RowsArguments) == 112, "RowsArguments");
OFFSET(RowsArguments, output, 48);
OFFSET(RowsArguments, sources, 64);
OFFSET(RowsArguments, items, 80);
OFFSET(RowsArguments, factor, 88);
OFFSET(RowsArguments, inputs, 96);
OFFSET(RowsArguments, loose, 104);
static_assert(sizeof(Copy) == 24, "Copy");
static_assert(sizeof(CopyArguments) == 1848, "CopyArguments");
OFFSET(CopyArguments, copies, 48);
OFFSET(CopyArguments, copy, 56);
OFFSET(CopyArguments, end, 1592);
static_assert(sizeof(Dim) == 32, "Dim");
OFFSET(Dim, multiplier, 24);
static_assert(sizeof(StridedArguments) == 368, "StridedArguments");
OFFSET(StridedArguments, count, 64);
OFFSET(StridedArguments, dims, 72);
OFFSET(StridedArguments, dim, 80);
