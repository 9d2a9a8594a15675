// Blocks of several ranks' kernels that wait for each other while they run. Only where these kernels run at the same time.
//
// Each rank has words in memory that all of them reach. At the beginning stand those that end all meetings; then come the
// channels, and in a channel a row for each block:
//   stop:     not zero where a meeting has failed: every later one fails at once, and writes nothing
//   told:     not zero where the host was told so
//   a row:    how often the block has met the others, and then for each rank what the same block of that rank has written
//             here: its own number, which it raises when it comes
// Words only grow. Nothing but the block itself counts its meetings, so that a launch is the same each time it is run.
//
// A block that waits looks at the clock and at `stop`. The abort words lie in the host's memory, where reads take a microsecond
// each, one after the other. So the blocks take turns: in each slot of time one of them reads.
#pragma once

#include "arguments.cuh"

struct Meeting {
    const MeetingArguments &arguments;
    // How often this block has met the others, and what ended that.
    u64 turn;
    u32 stopped;

    DEVICE explicit Meeting(const MeetingArguments &given) : arguments(given), turn(0), stopped(0) {
        if (given.ranks == 0) return;
        turn = load_shared_with_all(row(given.rank));
        stopped = (u32)load_shared_with_all(stop(given.rank));
    }

    // The same block of every rank has come here, and what all threads of those blocks have written before is seen. False: some
    // have not, and the block ends without writing anything. All threads of a block must come here equally often.
    DEVICE bool held() {
        if (arguments.ranks == 0) return true;
        turn += 1;
        u32 gone = 0;
        // What the other threads have written is passed on by those that signal.
        if (any_in_block(0)) return false;
        ROLL
        for (u32 rank = thread(); rank < arguments.ranks; rank += threads()) {
            if (rank == arguments.rank && arguments.ranks > 1) continue;
            gone |= stopped != 0 ? give_up(stopped) : missed(rank);
        }
        return !any_in_block(gone);
    }

    // Notes the meetings for the next launch. After the last of them was held.
    DEVICE void end() const {
        // Of all threads this one comes last where they run one after the other.
        if (arguments.ranks != 0 && thread() == threads() - 1) store_shared_with_all(row(arguments.rank), turn);
    }

private:
    // Bits that tell the host how it ended, beside the rank that was awaited, the one that gave up, and the channel.
    static constexpr u32 FAILED = 1u << 31, LATE = 1u << 24, ABORTED = 2u << 24;
    // A slot of time, as a shift of nanoseconds: 33 us.
    static constexpr u32 SLOT = 15;
    // How often a word is read before anything else is looked at.
    static constexpr int LOOKS = 32;

    DEVICE u64 row(u32 rank) const { return arguments.words[rank] + (u64)block() * arguments.row; }
    DEVICE u64 stop(u32 rank) const { return arguments.words[rank] - arguments.back; }

    // Signals to a rank and waits for it.
    DEVICE u32 missed(u32 rank) const {
        u64 word = row(arguments.rank) + 8 + 8 * (u64)rank;
        release_to_all(row(rank) + 8 + 8 * (u64)arguments.rank, turn);
        if (acquire_from_all(word) >= turn) return 0;
        u32 about = FAILED | arguments.channel << 16 | arguments.rank << 8 | rank;
        u64 begin = nanoseconds(), slot = begin >> SLOT;
        ROLL
        for (;;) {
            ROLL
            for (int i = 0; i < LOOKS; i++) {
                if (acquire_from_all(word) >= turn) return 0;
            }
            u64 now = nanoseconds();
            u32 seen = (u32)load_shared_with_all(stop(arguments.rank));
            if (seen != 0) return give_up(seen);
            if (now - begin > arguments.timeout) return give_up(about | LATE);
            if (now >> SLOT == slot) continue;
            slot = now >> SLOT;
            if ((u32)slot % blocks() == block() && aborted()) return give_up(about | ABORTED);
        }
    }

    DEVICE bool aborted() const {
        u32 words = 0;
        if (arguments.abort[0] != 0) words |= load_shared_with_host(arguments.abort[0]);
        if (arguments.abort[1] != 0) words |= load_shared_with_host(arguments.abort[1]);
        return words != 0;
    }

    // The first reason counts. One thread tells the other ranks, and then the host.
    DEVICE u32 give_up(u32 why) const {
        u64 own = stop(arguments.rank), before = swap_zero_shared_with_all(own, why);
        u32 reason = before != 0 ? (u32)before : why;
        if (swap_zero_shared_with_all(own + 8, 1) != 0) return 1;
        ROLL
        for (u32 rank = 0; rank < arguments.ranks; rank++) {
            if (rank != arguments.rank) store_shared_with_all(stop(rank), reason);
        }
        if (arguments.failure != 0) store_shared_with_host(arguments.failure, reason);
        // Somebody else has set one of the abort words.
        if ((reason & LATE) != 0 && arguments.abort[0] != 0) store_shared_with_host(arguments.abort[0], ~0u);
        return 1;
    }
};
