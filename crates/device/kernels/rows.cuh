// Rows of an output, each made of rows that lie anywhere, combined in their order.
#pragma once

#include "reduce.cuh"

// Every thread of a block goes through the loop equally often: each takes one item of one row.
template <class T, class Op, class Item> DEVICE void sweep_rows(const RowsArguments &arguments) {
    constexpr int LANES = Item::LANES;
    Gate gate(arguments.gate);
    auto factor = Op::template factor<T>(arguments);
    bool loose = T::SIZE > 1 && arguments.loose != 0;
    u64 all = arguments.rows * arguments.items;
    ROLL
    for (u64 first = (u64)block() * threads(); first < all; first += (u64)blocks() * threads()) {
        u64 item = first + thread();
        bool here[1] = {item < all};
        u64 row = here[0] ? item / arguments.items : 0;
        u64 offset[1] = {(item - row * arguments.items) * Item::BYTES};
        u32 source, end;
        load_cached(source, arguments.ends + (row - 1) * 4, here[0] && row != 0);
        load_cached(end, arguments.ends + row * 4, here[0]);
        typename T::Wide result[1][LANES] = {};
        ROLL
        for (bool begun = false; source < end; source++, begun = true) {
            u64 from;
            load(from, arguments.sources + (u64)source * 8, true);
            typename Item::Memory memory[1];
            Item::fetch(memory, from, offset, here, loose);
            combine<T, Op, Item>(result, memory, !begun, factor);
        }
        UNROLL
        for (int i = 0; i < LANES; i++) result[0][i] = Op::template leave<T>(result[0][i], factor);
        typename Item::Memory written[1] = {Item::narrow(result[0])};
        if (gate.closed()) return;
        Item::put(arguments.output + row * arguments.items * Item::BYTES, offset, written, here, loose);
    }
}

template <class T, class Op> DEVICE void reduce_rows(const RowsArguments &arguments) {
    if (arguments.packed != 0) {
        sweep_rows<T, Op, Packed<T, true>>(arguments);
    } else {
        sweep_rows<T, Op, Single<T, true>>(arguments);
    }
}
