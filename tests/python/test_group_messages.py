"""Messages between two ranks: order, tags, any source, oneself, both directions at once."""

import asyncio
import random

import numpy as np
import pytest
from ranks import here

import tensorwire


def array(*values):
    return np.array(values, "i8")


def test_messages_of_a_tag_keep_their_order(pools):
    pools(2).run(check_order)


def check_order():
    group, rank = here().group, here().rank
    if rank == 0:
        works = [group.send(array(i), 1, async_op=True) for i in range(200)]
        for work in works:
            work.wait()
    else:
        for i in range(200):
            x = array(-1)
            work = group.recv(x, 0)
            assert x[0] == i and work.source == 0 and work.name == "recv"


def test_tags_keep_messages_apart(pools):
    pools(2).run(check_tags)


def check_tags():
    group, rank = here().group, here().rank
    tags = [0, 1, 7, 2**31, 2**63]
    if rank == 0:
        for tag in tags:
            group.send(array(tag % 1000), 1, tag, async_op=True)
        group.barrier()
    else:
        for tag in reversed(tags):
            x = array(-1)
            group.recv(x, 0, tag)
            assert x[0] == tag % 1000
        group.barrier()


def test_messages_to_oneself(pools):
    pools(1).run(check_self)
    pools(2).run(check_self)


def check_self():
    group, rank = here().group, here().rank
    x = array(0, 0)
    received = group.recv(x, rank, 4, async_op=True)
    assert not received.done()
    group.send(array(3, 4), rank, 4)
    received.wait()
    assert x.tolist() == [3, 4]
    sent = group.send(array(5, 6), rank, 4, async_op=True)
    group.recv(x, rank, 4)
    sent.wait()
    assert x.tolist() == [5, 6]
    big = np.arange(1_000_000)
    out = np.zeros_like(big)
    sent = group.send(big, rank, async_op=True)
    work = group.recv_any(out)
    sent.wait()
    assert work.source == rank
    np.testing.assert_array_equal(out, big)


def test_from_any_rank(pools):
    pools(3).run(check_any)


def check_any():
    group, rank = here().group, here().rank
    if rank == 0:
        seen = []
        for i in range(10):
            x = array(-1)
            if i % 2:
                work = group.recv_any(x, 9)
            else:
                work = group.recv_any(x, 9, async_op=True)
                work.wait()
            assert x[0] // 100 == work.source
            seen.append((work.source, int(x[0]) % 100))
        for source in (1, 2):
            assert [number for who, number in seen if who == source] == list(range(5))
    else:
        for i in range(5):
            group.send(array(100 * rank + i), 0, 9)
    group.barrier()


def test_the_source_is_none_until_it_is_known(pools):
    pools(2).run(check_source)


def check_source():
    group, rank = here().group, here().rank
    if rank == 0:
        x = array(0)
        work = group.recv_any(x, 5, async_op=True)
        assert work.source is None and work.duration is None and not work.done() and work.error() is None
        assert "in flight" in repr(work)
        group.barrier()
        work.wait()
        assert work.source == 1 and work.done() and work.duration >= 0
    else:
        group.barrier()
        group.send(array(1), 0, 5)


@pytest.mark.parametrize("world", [2, 3])
def test_large_messages_both_ways_at_once(pools, world):
    pools(world).run(check_large)


def check_large():
    group, rank, world = here().group, here().rank, here().world
    count = 2_000_000
    ins = {r: np.zeros(count, "i4") for r in range(world)}
    works = [group.recv(ins[r], r, async_op=True) for r in range(world)]
    works += [group.send(np.arange(count, dtype="i4") + rank, r, async_op=True) for r in range(world)]
    for work in works:
        work.wait()
    for r in range(world):
        np.testing.assert_array_equal(ins[r], np.arange(count, dtype="i4") + r)


def test_messages_and_collectives_do_not_meet(pools):
    pools(2).run(check_mixed)


def check_mixed():
    group, rank = here().group, here().rank
    x = array(0)
    if rank == 1:
        received = group.recv(x, 0, async_op=True)
    for i in range(10):
        y = array(i)
        group.all_reduce(y)
        assert y[0] == 2 * i
    if rank == 0:
        group.send(array(8), 1)
    else:
        received.wait()
        assert x[0] == 8
    group.barrier()


def test_empty_messages(pools):
    pools(2).run(check_empty)


def check_empty():
    group, rank = here().group, here().rank
    x = np.zeros(0, "f4")
    if rank == 0:
        group.send(x, 1)
    else:
        assert group.recv(x, 0).source == 0


def test_a_message_of_another_size_or_type_is_a_mismatch(pools):
    pools(2).run(check_wrong)


def check_wrong():
    rank = here().rank
    for sent, into in ((np.zeros(4, "f4"), np.zeros(5, "f4")), (np.zeros(4, "f4"), np.zeros(4, "i4"))):
        group = here().fresh()
        if rank == 0:
            work = group.send(sent, 1, async_op=True)
            try:
                work.wait(30)
            except tensorwire.MismatchError:
                pass
        else:
            with pytest.raises(tensorwire.MismatchError, match="rank 0") as caught:
                group.recv(into, 0)
            assert caught.value.rank == 0 and caught.value.kind == "mismatch"
            assert not into.any()
        here().group.barrier()


def test_both_send_first(pools):
    pools(2).run(check_both_send)


def check_both_send():
    """Small messages need nobody who waits for them."""
    group, rank = here().group, here().rank
    group.send(array(rank), 1 - rank)
    x = array(-1)
    group.recv(x, 1 - rank)
    assert x[0] == 1 - rank


# Receives that are given up


async def as_coroutine(work):
    return await work


@pytest.mark.parametrize("count", [1, 1000, 1_000_000])
def test_a_receive_whose_await_gives_up_takes_no_message(pools, count):
    pools(2).run(check_give_up, count)


def check_give_up(count):
    group, rank = here().group, here().rank

    async def give_up(x, call):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call(x), 0.05)

    if rank == 0:
        xs = [np.full(count, -1) for _ in range(3)]
        asyncio.run(give_up(xs[0], lambda x: as_coroutine(group.recv(x, 1, async_op=True))))
        asyncio.run(give_up(xs[1], lambda x: as_coroutine(group.recv_any(x, async_op=True))))
        asyncio.run(give_up(xs[2], lambda x: group.recv(x, 1, async_op=True)))
        group.barrier()
        y = np.zeros(count, int)
        group.recv(y, 1, timeout=30)
        np.testing.assert_array_equal(y, np.arange(count))
        for x in xs:
            np.testing.assert_array_equal(x, -1)
    else:
        group.barrier()
        group.send(np.arange(count), 0)
    group.barrier()


def test_a_message_that_is_on_its_way_goes_to_the_next_receive(pools):
    pools(2).run(check_on_its_way)


def check_on_its_way():
    group, rank = here().group, here().rank
    count = 4_000_000
    if rank == 0:
        x, y = np.full(count, -1), np.zeros(count, int)

        async def main():
            task = asyncio.ensure_future(as_coroutine(group.recv(x, 1, async_op=True)))
            await asyncio.sleep(0)  # it awaits the work now, which has taken a part of the message
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        group.barrier()
        asyncio.run(main())
        seen = x.copy()
        group.barrier()  # its sender has not been held up
        group.recv_any(y)
        np.testing.assert_array_equal(y, np.arange(count))
        np.testing.assert_array_equal(x, seen)
    else:
        work = group.send(np.arange(count), 0, async_op=True)
        group.barrier()
        work.wait()
        group.barrier()


def test_a_message_that_came_while_its_await_was_cancelled(pools):
    pools(2).run(check_came_meanwhile)


def check_came_meanwhile():
    """All of it is there, but the coroutine has not gone on since: it never hears of it."""
    group, rank = here().group, here().rank
    if rank == 1:
        for i in range(3):
            group.send(array(i), 0)
        group.barrier()
        return

    async def main(settled):
        x = array(-1)
        work = group.recv(x, 1, async_op=True)
        task = asyncio.ensure_future(as_coroutine(work))
        await asyncio.sleep(0)
        while "in flight" in repr(work):  # the loop stands still meanwhile
            pass
        if settled:
            # The future behind the await may have its result then, and the task is about to go on.
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert isinstance(work.error(), tensorwire.AbortedError) and not work.withdraw()

    for settled in (False, True):
        asyncio.run(main(settled))
    for i in range(3):
        x = array(-1)
        group.recv(x, 1, timeout=30)
        assert x[0] == i
    with pytest.raises(TimeoutError):
        group.recv(array(0), 1, timeout=0)
    group.barrier()


def test_messages_come_in_order_whatever_is_given_up(pools):
    pools(2).run(check_random_cancels)


def check_random_cancels():
    group, rank = here().group, here().rank
    count, dice = 300, random.Random(5)
    sizes = [1, 1000, 100_000]

    def message(i):
        return np.arange(sizes[i % 3]) + i

    if rank == 1:
        for i in range(count):
            group.send(message(i), 0)
        group.barrier()
        return

    async def main():
        i = 0
        while i < count:
            x = np.full(sizes[i % 3], -1)
            work = group.recv(x, 1, async_op=True) if dice.random() < 0.5 else group.recv_any(x, async_op=True)
            try:
                await asyncio.wait_for(work, dice.random() * dice.choice([1e-5, 1e-4, 1e-3]))
            except asyncio.TimeoutError:
                continue
            np.testing.assert_array_equal(x, message(i))
            i += 1

    asyncio.run(main())
    with pytest.raises(TimeoutError):
        group.recv(array(0), 1, timeout=0)
    group.barrier()


def test_the_others_in_line_keep_their_places(pools):
    pools(2).run(check_line)


def check_line():
    group, rank = here().group, here().rank
    if rank == 0:
        xs = [array(-1) for _ in range(5)]
        works = [group.recv(x, 1, async_op=True) for x in xs]

        async def main():
            tasks = [asyncio.ensure_future(as_coroutine(work)) for work in works]
            await asyncio.sleep(0)
            tasks[1].cancel()
            assert works[3].withdraw() and not works[3].withdraw()
            await asyncio.sleep(0)
            group.barrier()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = asyncio.run(main())
        assert [type(result) for result in results] == [
            type(None),
            asyncio.CancelledError,
            type(None),
            tensorwire.AbortedError,
            type(None),
        ]
        assert "recv with tag 0 was withdrawn; its message goes to the next receive" in str(results[3])
        assert [int(x[0]) for x in xs] == [0, -1, 1, -1, 2]
        assert all(work.done() for work in works) and "failed" in repr(works[1])
    else:
        group.barrier()
        for i in range(3):
            group.send(array(i), 0)
    group.barrier()


def test_a_receive_goes_on_when_its_work_is_dropped(pools):
    pools(2).run(check_dropped)


def check_dropped():
    group, rank = here().group, here().rank
    if rank == 0:
        xs = [array(-1), array(-1)]
        group.recv(xs[0], 1, 1, async_op=True)
        group.recv_any(xs[1], 1, async_op=True)
        group.barrier()
        group.recv(array(0), 1, 2)
        assert [int(x[0]) for x in xs] == [0, 1]
    else:
        group.barrier()
        for i in range(2):
            group.send(array(i), 0, 1)
        group.send(array(9), 0, 2)
    group.barrier()
