// The words that tell whether the work is still wanted. They are looked at once for a launch, before anything is written. And
// the word that tells when the work ended.
#pragma once

#include "arguments.cuh"

// The words lie in the host's memory, and the GPU serves the reads of one word one after the other, a microsecond each. So
// one block reads them and passes on what it has read: the first one that comes. Nobody has to count on the order in which
// blocks begin: the others wait for a block that runs already and that waits for nobody.
//
// Each stream has a place of its own, as the kernels of one stream run one after the other. The number of the launch tells
// its words from those of the launch before. What a place holds only grows: four times the number, and then
//   1: a block reads the words
//   2: none of them is set
//   3: one of them is set
// A launch that is captured and replayed has the number of its first run: it does not look again.
SHARED_BY_BLOCKS u64 gates[MOST_GATES][16];

struct Gate {
    const GateArguments &arguments;
    // Known to the first thread of a block only.
    u32 verdict;
    bool passed;

    static constexpr u32 OPEN = 0, CLOSED = 1, UNKNOWN = 2;

    DEVICE explicit Gate(const GateArguments &given) : arguments(given), verdict(OPEN), passed(false) {
        if (thread() == 0 && (given.abort[0] | given.abort[1]) != 0) verdict = look();
    }

    // The block that begins last writes its end. All of them share the work evenly, so they end at about the same time. A write
    // of every block was to be seen in the time of large launches.
    DEVICE ~Gate() {
        if (thread() == 0 && block() + 1 == blocks() && arguments.stamp != 0)
            store_shared_with_all(arguments.stamp, nanoseconds() + arguments.offset);
    }

    // Whether to write nothing. All threads of a block must come here equally often.
    DEVICE bool closed() {
        if (passed) return false;
        passed = true;
        if (verdict == UNKNOWN) verdict = wait();
        return any_in_block(verdict);
    }

private:
    DEVICE u32 read() const {
        u32 words = 0;
        if (arguments.abort[0] != 0) words |= load_shared_with_host(arguments.abort[0]);
        if (arguments.abort[1] != 0) words |= load_shared_with_host(arguments.abort[1]);
        return words != 0 ? CLOSED : OPEN;
    }

    // Reads the words, if no other block does.
    DEVICE u32 look() const {
        if (arguments.place >= MOST_GATES) return read();
        u64 *place = gates[arguments.place], mine = arguments.launch * 4 + 1;
        u64 before = raise_shared(place, mine);
        if (before > mine) return before & 1;
        if (before == mine) return UNKNOWN;
        u32 seen = read();
        raise_shared(place, mine + 1 + seen);
        return seen;
    }

    // For the block that reads them.
    DEVICE u32 wait() const {
        u64 value;
        do {
            value = load_shared(gates[arguments.place]);
        } while (value <= arguments.launch * 4 + 1);
        return value & 1;
    }
};
