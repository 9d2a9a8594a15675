// Copies that heed the abort words: bytes, and elements of strided tensors.
#pragma once

#include "gate.cuh"

// Bytes from `address` to the next multiple of sixteen.
DEVICE u64 before_pack(u64 address, u64 bytes) {
    u64 before = (0 - address) & 15;
    return before < bytes ? before : bytes;
}

// Packs that a thread takes at once.
#define COPIED 4

// The blocks that make one copy, and this one among them.
struct Share {
    u32 block;
    u32 blocks;
};

// Sixteen bytes from five words: the address is `shift` bits past that of the first.
DEVICE Pack pack_at(const u32 (&words)[5], u32 shift) {
    return {{shift_pair(words[0], words[1], shift), shift_pair(words[1], words[2], shift),
             shift_pair(words[2], words[3], shift), shift_pair(words[3], words[4], shift)}};
}

// `head` bytes, then packs, then the rest. The packs lie at multiples of sixteen in `to`, and in `from` too where
// `together` is set; elsewhere at any address, with three bytes before and four bytes after them that may be read.
template <bool together> DEVICE bool copy_packs(const Copy &copy, Share share, Gate &gate, u64 head, u64 packs) {
    u64 to = copy.to + head, from = copy.from + head;
    u64 step = (u64)threads() * COPIED;
    ROLL
    for (u64 first = share.block * step; first < packs; first += share.blocks * step) {
        Pack pack[COPIED];
        u64 offset[COPIED];
        bool here[COPIED];
        UNROLL
        for (int u = 0; u < COPIED; u++) {
            u64 item = first + (u64)u * threads() + thread();
            here[u] = item < packs;
            offset[u] = item * 16;
            if (together) {
                load(pack[u], from + offset[u], here[u]);
            } else {
                u32 words[5];
                UNROLL
                for (int i = 0; i < 5; i++) load_cached(words[i], (from & ~3ull) + offset[u] + 4 * i, here[u]);
                pack[u] = pack_at(words, (u32)(from & 3) * 8);
            }
        }
        if (gate.closed()) return false;
        UNROLL
        for (int u = 0; u < COPIED; u++) store(to + offset[u], pack[u], here[u]);
    }
    return true;
}

// The first block takes the bytes at either end.
DEVICE void copy_bytes(const Copy &copy, Share share, Gate &gate) {
    bool together = ((copy.to ^ copy.from) & 15) == 0;
    u64 head = before_pack(copy.to, copy.bytes);
    u64 packs = (copy.bytes - head) / 16;
    if (!together) {
        // One pack is left to either end, so that no word is read that is not wholly in the source.
        head = head + 16 < copy.bytes ? head + 16 : copy.bytes;
        packs = (copy.bytes - head) / 16;
        if (packs > 0) packs -= 1;
    }
    if (!(together ? copy_packs<true>(copy, share, gate, head, packs) : copy_packs<false>(copy, share, gate, head, packs)))
        return;
    if (share.block != 0 || gate.closed()) return;
    u64 ends = copy.bytes - packs * 16;
    ROLL
    for (u64 i = thread(); i < ends; i += threads()) {
        u64 offset = i < head ? i : i + packs * 16;
        u8 byte;
        load(byte, copy.from + offset, true);
        store(copy.to + offset, byte, true);
    }
}

// Every block takes a part of one copy.
DEVICE void copy_all(const CopyArguments &arguments) {
    Gate gate(arguments.gate);
    // The first copy whose blocks do not end before this one.
    u32 which = 0;
    ROLL
    for (u32 step = MOST_COPIES / 2; step > 0; step /= 2) {
        if (which + step <= arguments.copies && arguments.end[which + step - 1] <= block()) which += step;
    }
    if (which >= arguments.copies) return;
    u32 begin = which == 0 ? 0 : arguments.end[which - 1];
    copy_bytes(arguments.copy[which], {block() - begin, arguments.end[which] - begin}, gate);
}

// By multiplication for less than 2^31.
DEVICE u32 quotient(u32 x, const Dim &dim) { return (multiply_high(x, dim.multiplier) + x) >> dim.shift; }
DEVICE u64 quotient(u64 x, const Dim &dim) { return x / dim.size; }

// Elements in flight for each thread.
#define GATHERED 4

template <class Memory, class Index> DEVICE void copy_elements(const StridedArguments &arguments, Gate &gate) {
    Index step = (Index)threads() * GATHERED, count = (Index)arguments.count;
    // Below 2^31 neither this nor the sum with a step wraps.
    ROLL
    for (Index first = block() * step; first < count; first += blocks() * step) {
        Memory memory[GATHERED];
        Index item[GATHERED];
        i64 to[GATHERED], from[GATHERED];
        bool here[GATHERED];
        UNROLL
        for (int u = 0; u < GATHERED; u++) {
            item[u] = first + (Index)u * threads() + thread();
            here[u] = item[u] < count;
            to[u] = from[u] = 0;
        }
        ROLL
        for (u32 d = 0; d < arguments.dims; d++) {
            const Dim &dim = arguments.dim[d];
            UNROLL
            for (int u = 0; u < GATHERED; u++) {
                // What is left for the outermost one is its index.
                Index rest = d + 1 < arguments.dims ? quotient(item[u], dim) : 0;
                i64 index = (i64)(item[u] - rest * (Index)dim.size);
                to[u] += index * dim.to;
                from[u] += index * dim.from;
                item[u] = rest;
            }
        }
        UNROLL
        for (int u = 0; u < GATHERED; u++) load(memory[u], arguments.from + (u64)from[u], here[u]);
        if (gate.closed()) return;
        UNROLL
        for (int u = 0; u < GATHERED; u++) store(arguments.to + (u64)to[u], memory[u], here[u]);
    }
}

template <class Memory> DEVICE void copy_strided(const StridedArguments &arguments) {
    Gate gate(arguments.gate);
    if (arguments.count < 1ull << 31)
        copy_elements<Memory, u32>(arguments, gate);
    else
        copy_elements<Memory, u64>(arguments, gate);
}
