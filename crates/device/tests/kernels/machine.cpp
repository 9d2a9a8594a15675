// Runs the kernels of kernels.cu thread by thread. tests/kernels.rs builds this as a library and calls it.
#include "kernels.cu"

thread_local Place place;
thread_local std::vector<Range> readable, writable;
thread_local u64 faults;

// Nobody but the first thread of a block, which comes first, reads the words.
u32 looked_up_by_first_thread(u32 mine) {
    static thread_local u32 first;
    if (place.thread == 0) first = mine;
    return first;
}

u32 float_to_half(float x) {
    u32 sign = as_bits(x) >> 31 << 15;
    float magnitude = as_float(as_bits(x) & 0x7fffffff);
    if (x != x) return 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    u32 low = 0, high = 0x7c00;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        (half_to_float(middle) <= magnitude ? low : high) = middle;
    }
    double next = high == 0x7c00 ? 65536.0 : half_to_float(high);
    double down = (double)magnitude - half_to_float(low), up = next - magnitude;
    return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
}

template <class Arguments> static u64 run(void *kernel, const void *arguments, Place grid, u32 begin, u32 end) {
    Arguments copy;
    memcpy((void *)&copy, arguments, sizeof copy);
    faults = 0;
    place = grid;
    for (place.block = begin; place.block < end; place.block++)
        for (place.thread = 0; place.thread < grid.threads; place.thread++) ((void (*)(Arguments))kernel)(copy);
    readable.clear();
    writable.clear();
    return faults;
}

extern "C" void allow_read(u64 begin, u64 bytes) { readable.push_back({begin, begin + bytes}); }
extern "C" void allow_write(u64 begin, u64 bytes) { writable.push_back({begin, begin + bytes}); }

// Runs blocks `begin` to `end` of a grid on the memory that was allowed since the last run, and tells how many accesses were
// wrong.
extern "C" u64 launch(void *kernel, const void *arguments, u64 size, u32 blocks, u32 threads, u32 begin, u32 end) {
    Place grid = {0, threads, 0, blocks};
    switch (size) {
    case sizeof(ReduceArguments): return run<ReduceArguments>(kernel, arguments, grid, begin, end);
    case sizeof(TogetherArguments): return run<TogetherArguments>(kernel, arguments, grid, begin, end);
    case sizeof(MeetingArguments): return run<MeetingArguments>(kernel, arguments, grid, begin, end);
    case sizeof(StridedArguments): return run<StridedArguments>(kernel, arguments, grid, begin, end);
    case sizeof(RowsArguments): return run<RowsArguments>(kernel, arguments, grid, begin, end);
    case sizeof(CopyArguments): return run<CopyArguments>(kernel, arguments, grid, begin, end);
    }
    return ~0ull;
}
