"""Shared memory: every group recognises it, and it goes with its last view."""

import gc
import re
import time

import numpy as np
import pytest
from ranks import here

import tensorwire
from tensorwire import _native


def mapped():
    """The bytes of shared memory that this process has mapped."""
    total = 0
    for line in open("/proc/self/maps"):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*memfd:", line)
        if found:
            total += int(found[2], 16) - int(found[1], 16)
    return total


def wait_until(question, seconds=20):
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_a_buffer():
    memory = _native.alloc(1000)
    assert memory.nbytes == len(memory) == 1000
    view = memoryview(memory)
    assert view.nbytes == 1000 and not view.readonly and view.format == "B" and view.contiguous
    assert bytes(view) == bytes(1000)
    view[10] = 7
    assert np.asarray(memory)[10] == 7
    assert "1000" in repr(memory)
    with pytest.raises(TypeError):
        _native.Memory()


@pytest.mark.parametrize("nbytes", [-1, 1.5, "1", None])
def test_sizes_that_are_none(nbytes):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        _native.alloc(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_more_than_there_is(nbytes):
    with pytest.raises((tensorwire.TensorwireError, MemoryError, OverflowError)):
        _native.alloc(nbytes)
    assert bytes(_native.alloc(1)) == b"\0"


def test_zero_bytes(pools):
    pools(2).run(check_zero)


def check_zero():
    memory = tensorwire.alloc(0)
    assert memory.nbytes == 0 and bytes(memory) == b""
    here().group.all_reduce(memory)
    here().group.all_reduce(np.frombuffer(memory, "f4"))


def test_given_back_with_the_last_view():
    size = 64 << 20
    before = mapped()
    memory = _native.alloc(size)
    array = np.frombuffer(memory, "f4")
    array[::1024] = 1
    assert mapped() >= before + size
    part = array[1000:2000].reshape(10, 100)[:, 1:]
    del memory, array
    gc.collect()
    assert mapped() >= before + size and part.shape == (10, 99)
    part[:] = 3
    del part
    gc.collect()
    assert mapped() < before + size


def test_given_back_after_collectives_of_several_groups(pools):
    pools(2).run(check_given_back)


def check_given_back():
    group, other = here().group, here().fresh()
    sub = group.subgroup([1, 0])
    size = 16 << 20
    before = mapped()
    for round in range(3):
        memory = tensorwire.alloc(size)
        x = np.frombuffer(memory, "i4")
        del memory
        for one in (group, other, sub):
            x[:] = round + one.rank
            one.all_reduce(x)
            assert (x == 2 * round + 1).all()
        work = group.all_reduce(x, async_op=True)
        del x
        work.wait()
        del work
    gc.collect()
    # Peers may hold on to a mapping of ours until they next have a look.
    for one in (group, other, sub):
        one.barrier()
    wait_until(lambda: mapped() < before + 4 * size)
    other.close()
    sub.close()


def test_no_growth(pools):
    pools(2).run(check_growth)


def check_growth():
    """A hundred pieces of 4 MiB each, used and dropped: far fewer may be there at the end."""
    group = here().group
    before = mapped()
    for _ in range(100):
        x = np.frombuffer(tensorwire.alloc(4 << 20), "i4")
        x[:] = 1
        group.all_reduce(x)
        assert x[-1] == 2
    del x
    gc.collect()
    group.barrier()
    assert mapped() < before + (100 << 20)


def test_slices(pools):
    pools(2).run(check_slices)


def check_slices():
    group, rank = here().group, here().rank
    memory = tensorwire.alloc(4 * 100_000)
    x = np.frombuffer(memory, "i4")
    slices = [
        slice(0, 100_000),
        slice(1, 99_999),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(50_000, 50_001),
        slice(99_999, None),
        slice(10, 10),
    ]
    for part in slices:
        x[:] = -5
        view = x[part]
        view[:] = np.arange(view.size) + rank
        group.all_reduce(view)
        np.testing.assert_array_equal(view, 2 * np.arange(view.size) + 1)
        rest = np.ones(x.size, bool)
        rest[part] = False
        assert (x[rest] == -5).all()
    out = np.frombuffer(tensorwire.alloc(4 * 20_000), "i4")
    group.all_gather_into(out, x[rank * 10_000 : (rank + 1) * 10_000])
    x[:] = np.arange(100_000)
    group.all_gather_into(out, x[rank * 10_000 : (rank + 1) * 10_000])
    np.testing.assert_array_equal(out, np.arange(20_000))
    group.reduce_scatter_from(x[:10_000], out)
    np.testing.assert_array_equal(x[:10_000], 2 * np.arange(rank * 10_000, (rank + 1) * 10_000))
    # On one rank only.
    y = x if rank == 0 else np.zeros(100_000, "i4")
    y[:] = rank + 1
    group.all_reduce(y)
    assert (y == 3).all()


def test_memory_of_a_closed_group_lives(pools):
    pools(2).run(check_closed)


def check_closed():
    group = here().fresh()
    x = np.frombuffer(tensorwire.alloc(4096), "i4")
    x[:] = 1
    group.all_reduce(x)
    group.barrier()
    group.close()
    assert (x == 2).all()
    here().group.all_reduce(x)
    assert (x == 4).all()


def test_messages_from_shared_memory(pools):
    pools(2).run(check_messages)


def check_messages():
    group, rank = here().group, here().rank
    x = np.frombuffer(tensorwire.alloc(4 << 20), "i4")
    y = np.frombuffer(tensorwire.alloc(4 << 20), "i4")
    x[:] = np.arange(x.size) + rank
    sent = group.send(x, 1 - rank, async_op=True)
    group.recv(y, 1 - rank)
    sent.wait()
    np.testing.assert_array_equal(y, np.arange(y.size) + 1 - rank)
    x[:] = -1  # a message that was sent is not changed by what comes later
    np.testing.assert_array_equal(y, np.arange(y.size) + 1 - rank)
    group.barrier()
