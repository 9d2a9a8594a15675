"""Messages between two ranks: order, tags, any source, oneself, both directions at once."""

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
