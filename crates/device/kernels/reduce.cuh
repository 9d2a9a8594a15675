// n inputs combined in their order, element by element, and written to m outputs in one pass.
#pragma once

#include "gate.cuh"
#include "meeting.cuh"
#include "operations.cuh"

// Sixteen bytes at a time. `LEAN` code does the same with fewer of them in flight: what little work needs.
template <class T, bool LEAN = false> struct Packed {
    static constexpr int LANES = T::LANES, BYTES = 16;
    // Inputs that are on their way at once; divides MOST_SPANS.
    static constexpr int BATCH = 4;
    // Packs of each that a thread takes. Of narrow elements a single one is much work, and many registers.
    static constexpr int UNROLLED = LEAN || LANES == 16 ? 1 : 2;
    // Whether the code is repeated for each input of a batch.
    static constexpr bool REPEATED = !LEAN && LANES < 16;
    typedef Pack Memory;

    static DEVICE void fetch(Memory (&into)[UNROLLED], u64 from, const u64 (&offset)[UNROLLED],
                             const bool (&wanted)[UNROLLED], bool) {
        UNROLL
        for (int u = 0; u < UNROLLED; u++) load(into[u], from + offset[u], wanted[u]);
    }
    static DEVICE void put(u64 to, const u64 (&offset)[UNROLLED], const Memory (&from)[UNROLLED],
                           const bool (&wanted)[UNROLLED], bool) {
        UNROLL
        for (int u = 0; u < UNROLLED; u++) store(to + offset[u], from[u], wanted[u]);
    }
    static DEVICE typename T::Wide widen(const Memory &memory, int i) { return Lanes<T>::widen(memory, i); }
    static DEVICE Memory narrow(const typename T::Wide (&wide)[LANES]) { return Lanes<T>::narrow(wide); }
};

// Elements one by one: what is left beside the packs, or all where the spans lie differently. Those that are `loose` are
// taken in bytes.
template <class T, bool LEAN = false> struct Single {
    static constexpr int LANES = 1, BYTES = T::SIZE, BATCH = 1, UNROLLED = LEAN ? 1 : T::SIZE > 8 ? 2 : 4;
    static constexpr bool REPEATED = true;
    typedef typename Bits<T::SIZE>::Memory Memory;

    static DEVICE void fetch(Memory (&into)[UNROLLED], u64 from, const u64 (&offset)[UNROLLED],
                             const bool (&wanted)[UNROLLED], bool loose) {
        if (!loose) {
            UNROLL
            for (int u = 0; u < UNROLLED; u++) load(into[u], from + offset[u], wanted[u]);
            return;
        }
        UNROLL
        for (int u = 0; u < UNROLLED; u++) into[u] = Memory();
        ROLL
        for (int i = 0; i < T::SIZE; i++) {
            u8 byte[UNROLLED];
            UNROLL
            for (int u = 0; u < UNROLLED; u++) load(byte[u], from + offset[u] + i, wanted[u]);
            UNROLL
            for (int u = 0; u < UNROLLED; u++) into[u] = shifted(into[u], byte[u]);
        }
    }
    static DEVICE void put(u64 to, const u64 (&offset)[UNROLLED], const Memory (&from)[UNROLLED],
                           const bool (&wanted)[UNROLLED], bool loose) {
        if (!loose) {
            UNROLL
            for (int u = 0; u < UNROLLED; u++) store(to + offset[u], from[u], wanted[u]);
            return;
        }
        Memory rest[UNROLLED];
        UNROLL
        for (int u = 0; u < UNROLLED; u++) rest[u] = from[u];
        ROLL
        for (int i = 0; i < T::SIZE; i++) {
            UNROLL
            for (int u = 0; u < UNROLLED; u++) {
                store(to + offset[u] + i, lowest(rest[u]), wanted[u]);
                rest[u] = shifted(rest[u], 0);
            }
        }
    }
    static DEVICE typename T::Wide widen(const Memory &memory, int) { return T::widen(memory); }
    static DEVICE Memory narrow(const typename T::Wide (&wide)[1]) { return (Memory)T::narrow(wide[0]); }

private:
    // Without the lowest byte, and with another one on top.
    template <class Word> static DEVICE Word shifted(Word x, u8 top) {
        return (Word)((Word)(x >> 4) >> 4 | (Word)((Word)top << 8 * (sizeof(Word) - 1)));
    }
    static DEVICE Pack shifted(const Pack &x, u8 top) {
        return {{shift_pair(x.words[0], x.words[1], 8), shift_pair(x.words[1], x.words[2], 8),
                 shift_pair(x.words[2], x.words[3], 8), shifted(x.words[3], top)}};
    }
    template <class Word> static DEVICE u8 lowest(Word x) { return (u8)x; }
    static DEVICE u8 lowest(const Pack &x) { return (u8)x.words[0]; }
};

// One input, for all that a thread has of it.
template <class T, class Op, class Item, class Factor>
DEVICE void combine(typename T::Wide (&result)[Item::UNROLLED][Item::LANES],
                    const typename Item::Memory (&memory)[Item::UNROLLED], bool first, Factor factor) {
    UNROLL
    for (int u = 0; u < Item::UNROLLED; u++) {
        UNROLL
        for (int i = 0; i < Item::LANES; i++) {
            typename T::Wide x = Op::template enter<T>(Item::widen(memory[u], i), factor);
            result[u][i] = first ? x : Op::combine(result[u][i], x);
        }
    }
}

// The inputs from number `k` on: a batch, or as many as are left, which is the same for all threads.
template <class T, class Op, class Item, class Factor>
DEVICE void combine_batch(typename T::Wide (&result)[Item::UNROLLED][Item::LANES],
                          typename Item::Memory (&memory)[Item::BATCH][Item::UNROLLED], u32 k, u32 inputs, Factor factor) {
    if constexpr (Item::REPEATED) {
        UNROLL
        for (int j = 0; j < Item::BATCH; j++) {
            if (k + j < inputs) combine<T, Op, Item>(result, memory[j], j == 0 && k == 0, factor);
        }
    } else {
        // Each moves up to the place of the first.
        ROLL
        for (u32 j = k; j < k + Item::BATCH && j < inputs; j++) {
            combine<T, Op, Item>(result, memory[0], j == 0, factor);
            UNROLL
            for (int i = 1; i < Item::BATCH; i++) {
                UNROLL
                for (int u = 0; u < Item::UNROLLED; u++) memory[i - 1][u] = memory[i][u];
            }
        }
    }
}

// Takes `items` that begin `start` bytes into each span; those from number `gap` on lie `skipped` bytes further on. Every
// thread of a block goes through the loop equally often. Returns false where nothing is to be written.
template <class T, class Op, class Item>
DEVICE bool sweep(const ReduceArguments &arguments, Gate &gate, u64 start, u64 items, u64 gap, u64 skipped) {
    constexpr int UNROLLED = Item::UNROLLED, LANES = Item::LANES, BATCH = Item::BATCH;
    auto factor = Op::template factor<T>(arguments);
    bool loose = T::SIZE > 1 && arguments.loose != 0;
    u64 step = (u64)threads() * UNROLLED;
    ROLL
    for (u64 first = block() * step; first < items; first += blocks() * step) {
        u64 offset[UNROLLED];
        bool here[UNROLLED];
        UNROLL
        for (int u = 0; u < UNROLLED; u++) {
            u64 item = first + (u64)u * threads() + thread();
            here[u] = item < items;
            offset[u] = start + item * Item::BYTES + (item < gap ? 0 : skipped);
        }
        typename T::Wide result[UNROLLED][LANES];
        ROLL
        for (u32 k = 0; k < arguments.inputs; k += BATCH) {
            typename Item::Memory memory[BATCH][UNROLLED];
            UNROLL
            for (int j = 0; j < BATCH; j++) {
                bool wanted[UNROLLED];
                UNROLL
                for (int u = 0; u < UNROLLED; u++) wanted[u] = here[u] && k + j < arguments.inputs;
                Item::fetch(memory[j], arguments.input[k + j], offset, wanted, loose);
            }
            combine_batch<T, Op, Item>(result, memory, k, arguments.inputs, factor);
        }
        typename Item::Memory written[UNROLLED];
        UNROLL
        for (int u = 0; u < UNROLLED; u++) {
            UNROLL
            for (int i = 0; i < LANES; i++) result[u][i] = Op::template leave<T>(result[u][i], factor);
            written[u] = Item::narrow(result[u]);
        }
        if (gate.closed()) return false;
        ROLL
        for (u32 k = 0; k < arguments.outputs; k++) Item::put(arguments.output[k], offset, written, here, loose);
    }
    return true;
}

template <class T, class Op> DEVICE void reduce(const ReduceArguments &arguments) {
    constexpr u64 NONE = ~0ull;
    Gate gate(arguments.gate);
    u64 packed = arguments.packs * (16 / T::SIZE);
    if (!sweep<T, Op, Packed<T>>(arguments, gate, arguments.head * T::SIZE, arguments.packs, NONE, 0)) return;
    sweep<T, Op, Single<T>>(arguments, gate, 0, arguments.count - packed, arguments.head, packed * T::SIZE);
}

// The same together with other ranks, each its part of all spans: when all are there, and until all are done.
template <class T, class Op> DEVICE void together(const TogetherArguments &arguments) {
    constexpr u64 NONE = ~0ull;
    const ReduceArguments &own = arguments.reduce;
    Gate gate(own.gate);
    Meeting meeting(arguments.meeting);
    u64 packed = own.packs * (16 / T::SIZE);
    // Once around, so that the code of a meeting is there once.
    ROLL
    for (bool done = false;; done = true) {
        if (!meeting.held()) return;
        if (done) break;
        if (!sweep<T, Op, Packed<T, true>>(own, gate, own.head * T::SIZE, own.packs, NONE, 0)) return;
        if (!sweep<T, Op, Single<T, true>>(own, gate, 0, own.count - packed, own.head, packed * T::SIZE)) return;
    }
    meeting.end();
}
