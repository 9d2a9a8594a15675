"""Symmetric memory with NumPy: each rank reaches the memory of all, and signals to all."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from pages import add_commands, blocks, run
from ranks import Ranks, here

import tensorwire
from tensorwire import symmetric

WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world", WORLDS)
def test_the_program_of_the_page(tmp_path, world):
    ((language, text),) = blocks("symmetric.md")
    assert language == "python"
    add_commands(tmp_path)
    (tmp_path / "program.py").write_text(text)
    run(tmp_path, ["tensorwire", "run", "-n", str(world), "--", "python", "program.py"])


def neighbours(handle):
    """The ranks before and behind this one."""
    return (handle.rank - 1) % handle.world, (handle.rank + 1) % handle.world


@pytest.mark.parametrize("world", WORLDS)
def test_reach(pools, world):
    pools(world).run(check_reach)


def check_reach():
    group = here().group
    mine = symmetric.empty((group.world, 4), "int64")
    mine[:] = -1
    handle = symmetric.rendezvous(mine, group)
    assert (handle.rank, handle.world, handle.size) == (group.rank, group.world, mine.nbytes)
    handle.barrier()
    for rank in range(group.world):
        theirs = handle.buffer(rank)
        assert theirs.shape == mine.shape and theirs.dtype == mine.dtype
        theirs[group.rank] = 10 * group.rank + rank
        assert handle.access(rank) is True
    handle.barrier(channel=symmetric.CHANNELS - 1)
    assert (mine == [[10 * rank + group.rank] * 4 for rank in range(group.world)]).all()
    # Other shapes and types of the same memory; offsets count elements.
    before, behind = neighbours(handle)
    row = handle.buffer(behind, 4, offset=4 * group.rank)
    assert (row == 10 * group.rank + behind).all()
    assert handle.buffer(behind, (2, 5), "uint16", offset=3).shape == (2, 5)
    assert handle.buffer(group.rank).ctypes.data == mine.ctypes.data
    assert handle.buffer(behind, (0, 3)).shape == (0, 3)
    handle.barrier()
    # Addresses, as a device of this memory needs them and as numbers.
    addresses = handle.buffer_addresses
    assert addresses.dtype == np.int64 and addresses.tolist() == handle.buffer_ptrs
    assert handle.buffer_ptrs[group.rank] == mine.ctypes.data and 0 not in handle.buffer_ptrs
    assert handle.pad_addresses.tolist() == handle.pad_ptrs and len(set(handle.pad_ptrs)) == group.world
    # Memory of several ranks may begin anywhere; a part of it begins so much later.
    assert len(handle.offsets) == group.world and handle.offsets[group.rank] % mine.itemsize == 0
    with symmetric.rendezvous(mine[-1:], group) as part:
        later = [late - early for early, late in zip(handle.offsets, part.offsets, strict=True)]
    assert later == [mine[:-1].nbytes] * group.world
    assert handle.explain().count("\n") == group.world + 2 and f"{mine.nbytes} bytes" in handle.explain()
    handle.close()


@pytest.mark.parametrize("world", WORLDS)
def test_pads(pools, world):
    pools(world).run(check_pads)


def check_pads():
    group = here().group
    mine = symmetric.empty(100, "uint8")
    with symmetric.rendezvous(mine, group) as handle:
        before, behind = neighbours(handle)
        own = handle.pad(group.rank)
        assert own.dtype == np.uint32 and own.shape == (symmetric.CHANNELS * group.world,) and not own.any()
        handle.barrier()
        handle.pad(behind)[group.rank] = group.rank + 1
        handle.barrier()
        # Signals and barriers use no word of it.
        assert own[before] == before + 1 and np.count_nonzero(own) == 1
        handle.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_signals(pools, world):
    pools(world).run(check_signals)


def check_signals():
    group = here().group
    mine = symmetric.empty(1000, "float64")
    handle = symmetric.rendezvous(mine, group)
    before, behind = neighbours(handle)
    for round in range(200):
        handle.buffer(behind)[:] = 1000 * group.rank + round
        handle.put_signal(behind, 3)
        handle.wait_signal(before, channel=3)
        assert mine[0] == mine[-1] == 1000 * before + round
        # The rank before may write again.
        handle.put_signal(before, 4)
        handle.wait_signal(behind, 4)
    # None is lost, and there is not one more.
    for _ in range(50):
        handle.put_signal(behind, 5)
    for _ in range(50):
        handle.wait_signal(before, 5, timeout=50)
    with pytest.raises(tensorwire.TimeoutError, match=f"rank {before}") as late:
        handle.wait_signal(before, 5, timeout=0.01)
    assert late.value.ranks == [before]
    handle.barrier()
    handle.close()


def test_groups_and_parts_never_meet(pools):
    pools(3).run(check_groups)


def check_groups():
    group, other = here().group, here().group.subgroup([2, 0, 1])
    mine = symmetric.empty((4, 256), "int32")
    handles = [symmetric.rendezvous(mine, group), symmetric.rendezvous(mine[2], group), symmetric.rendezvous(mine, other)]
    whole, part, turned = handles
    assert (part.size, turned.rank) == (1024, other.rank)
    for round in range(20):
        for turn in range(3):
            handle = handles[(turn + round + group.rank) % 3]
            handle.put_signal(neighbours(handle)[1])
        for handle in handles:
            handle.wait_signal(neighbours(handle)[0])
        part.buffer(neighbours(part)[1])[:] = 100 * round + group.rank
        whole.barrier(3)
        assert (mine[2] == 100 * round + (group.rank - 1) % 3).all()
        turned.barrier(3)
    other.close()


def test_small_tensors_share_one_allocation(pools):
    pools(2).run(check_small)


def check_small():
    fds = len(os.listdir("/proc/self/fd"))
    many = [symmetric.empty(1024, "uint8") for _ in range(500)]
    assert len({array.ctypes.data // (2 << 20) for array in many}) <= 3
    assert len(os.listdir("/proc/self/fd")) <= fds + 3
    handles = [symmetric.rendezvous(array, here().group) for array in many[:60]]
    for number, handle in enumerate(handles):
        handle.buffer(1 - handle.rank)[:] = number
    handles[0].barrier()
    assert [int(array[1023]) for array in many[:60]] == list(range(60))
    handles[0].barrier()


def test_named_memory(pools):
    pools(2).run(check_named)


def check_named():
    group = here().group
    first = symmetric.empty((4, 8), "float32", name="workspace")
    first[:] = group.rank + 1
    address = first.ctypes.data
    del first
    gc.collect()
    # Other memory does not get in its place, and another shape of as many bytes is the same memory.
    others = [symmetric.empty(32) for _ in range(10)]
    again = symmetric.empty(128, "uint8", name="workspace")
    assert again.ctypes.data == address and (again.view("float32") == group.rank + 1).all()
    assert address not in [other.ctypes.data for other in others]
    also = symmetric.empty((8, 4), name="workspace")
    also[0, 0] = 77
    assert again.view("float32")[0] == 77
    assert symmetric.empty(32, name="another").ctypes.data != address
    with pytest.raises(tensorwire.MisuseError, match='"workspace" on .* has 128 bytes, and 132 were asked for'):
        symmetric.empty(33, name="workspace")
    handle = symmetric.rendezvous(again, group)
    handle.barrier()
    handle.buffer(1 - group.rank, 32, "float32")[1] = 55
    handle.barrier()
    assert also.flat[1] == 55
    handle.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_operations(pools, world):
    pools(world).run(check_operations)


def check_operations():
    group = here().group
    rank, world = group.rank, group.world
    each = np.arange(world)
    one = symmetric.empty(100_000, "int32")
    one[:] = rank
    symmetric.all_reduce(one, group=group)
    assert (one == each.sum()).all()
    one[:] = rank
    symmetric.all_reduce(one[::2], "max", group, timeout=50)
    assert (one[::2] == world - 1).all() and (one[1::2] == rank).all()
    one[:] = rank
    symmetric.broadcast(one, world - 1, group)
    assert (one == world - 1).all()
    parts, part = symmetric.empty((world, 5000), "int32"), symmetric.empty(5000, "int32")
    part[:] = rank
    symmetric.all_gather(parts, part, group)
    assert (parts == each[:, None]).all()
    # In place: each rank has its part where it belongs.
    parts[:], parts[rank] = -1, rank
    symmetric.all_gather(parts, parts[rank], group)
    assert (parts == each[:, None]).all()
    parts[:] = rank + 10 * each[:, None]
    symmetric.reduce_scatter(part, parts, group=group)
    assert (part == each.sum() + 10 * rank * world).all()
    got = symmetric.empty((world, 5000), "int32")
    work = symmetric.all_to_all(got, parts, group, async_op=True)
    work.wait(50)
    assert (got == 10 * rank + each[:, None]).all()
    for call in (lambda: symmetric.all_reduce(np.ones(3), group=group), lambda: symmetric.broadcast([1], 0, group)):
        with pytest.raises(tensorwire.MisuseError, match="takes tensors in symmetric memory"):
            call()
    group.barrier()


def test_large_operations_take_no_detour():
    with Ranks(2, {"TENSORWIRE_STRICT": "1"}) as ranks:
        ranks.run(check_no_detour)


def check_no_detour():
    group = here().group
    numbers = symmetric.empty(1 << 21, "float32")
    numbers[:] = 1
    symmetric.all_reduce(numbers, group=group)
    assert (numbers == 2).all()


def test_mappings_live_as_long_as_tensors(pools):
    pools(2).run(check_mappings)


def check_mappings():
    group = here().group
    mine = symmetric.empty(4 << 20, "uint8")
    mine[:] = group.rank + 1
    handle = symmetric.rendezvous(mine, group)
    handle.barrier()
    theirs = handle.buffer(1 - group.rank)[10:20].reshape(2, 5)
    handle.barrier()
    handle.close()
    del handle, mine
    gc.collect()
    group.barrier()
    # Whatever the other does with its memory: it is mapped here as long as somebody looks at it.
    assert theirs.shape == (2, 5) and theirs.sum() >= 0
    theirs[:] = 3
    group.barrier()


def test_closed(pools):
    pools(2).run(check_closed)


def check_closed():
    group = here().group
    with symmetric.rendezvous(symmetric.empty(8), group) as handle:
        handle.barrier()
    handle.close()
    for call in (
        handle.barrier,
        handle.explain,
        lambda: handle.buffer(0),
        lambda: handle.put_signal(1),
        lambda: handle.buffer_addresses,
    ):
        with pytest.raises(tensorwire.MisuseError, match="closed"):
            call()
    assert (handle.rank, handle.size) == (group.rank, 32)
    assert "rank" in repr(handle)


def test_wrong_calls(pools):
    pools(2).run(check_wrong)


def check_wrong():
    group = here().group
    refused = [
        (lambda: symmetric.empty(-1), "negative"),
        (lambda: symmetric.empty(3, "nonsense"), "nonsense"),
        (lambda: symmetric.empty(3, object), "Python objects"),
        (lambda: symmetric.empty(3, device="tpu"), "device='tpu'"),
        (lambda: symmetric.rendezvous(symmetric.empty((4, 4))[:, 1], group), "without gaps"),
        (lambda: symmetric.rendezvous(b"bytes", group), "not a bytes"),
        (lambda: symmetric.rendezvous(symmetric.empty(3), "a group"), "no group of tensorwire"),
        (lambda: symmetric.rendezvous(symmetric.empty(3)), "tensorwire.init"),
        (lambda: symmetric.mem_pool("cpu"), "on GPUs"),
    ]
    for call, words in refused:
        with pytest.raises(tensorwire.MisuseError, match=words):
            call()
    with symmetric.rendezvous(symmetric.empty(4, "float32"), group) as handle:
        for call, words in [
            (lambda: handle.buffer(2), "no rank 2"),
            (lambda: handle.put_signal(2), "no rank 2"),
            (lambda: handle.wait_signal(0, symmetric.CHANNELS), "no channel"),
            (lambda: handle.buffer(0, 5), "of 16"),
            (lambda: handle.buffer(0, 4, offset=1), "of 16"),
            (lambda: handle.buffer(0, 1, offset=-1), "of 16"),
            (lambda: handle.buffer(0, dtype="nonsense"), "nonsense"),
        ]:
            with pytest.raises(tensorwire.MisuseError, match=words):
                call()
        handle.barrier()


def test_ranks_that_differ(pools):
    pools(3).run(check_differ)


def check_differ():
    """All ranks hear of it, and can try again."""
    group = here().group
    right = symmetric.empty(64, "uint8")
    wrong = symmetric.empty(65, "uint8")
    last = group.rank == 2
    with pytest.raises(tensorwire.MismatchError, match="rank 0: 64 bytes; rank 1: 64 bytes; rank 2: 65 bytes") as raised:
        symmetric.rendezvous(wrong if last else right, group)
    assert raised.value.rank == 2
    # Memory that nobody else can map, on one rank.
    with pytest.raises(tensorwire.TensorwireError, match="cannot map this memory") as raised:
        symmetric.rendezvous(np.zeros(64, "uint8") if last else right, group)
    assert isinstance(raised.value, tensorwire.MisuseError) == last and (last or "rank 2" in str(raised.value))
    with symmetric.rendezvous(right, group) as handle:
        handle.barrier()


def test_a_rank_that_does_not_come(pools):
    pools(2).run(check_missing)


def check_missing():
    group = here().fresh()
    given_up = f"given up in call {here().calls}"
    if group.rank == 0:
        with pytest.raises(tensorwire.TimeoutError, match="rank 1") as late:
            symmetric.rendezvous(symmetric.empty(8), group, timeout=0.2)
        assert late.value.ranks == [1]
        here().store.set(given_up, b"")
    else:
        here().store.get(given_up)
        with pytest.raises(tensorwire.TensorwireError):
            symmetric.rendezvous(symmetric.empty(8), group)
    with symmetric.rendezvous(symmetric.empty(8), group) as handle:
        handle.barrier()
    group.close()


def test_a_dead_rank_ends_waits():
    with Ranks(3) as ranks:
        ranks.run(prepare)
        ranks[0].start(wait_for_the_dead)
        ranks[1].start(wait_for_the_dead)
        time.sleep(0.3)
        ranks[2].kill()
        for rank in (0, 1):
            assert "rank 2" in ranks[rank].result()


def prepare():
    global kept
    mine = symmetric.empty(64)
    kept = symmetric.rendezvous(mine, here().group), mine


def wait_for_the_dead():
    with pytest.raises(tensorwire.PeerDiedError) as raised:
        kept[0].wait_signal(2)
    return str(raised.value)


def test_ctrl_c_ends_a_wait():
    with Ranks(2) as ranks:
        ranks.run(prepare)
        ranks[0].start(interrupted)
        tensorwire.FileStore(os.path.join(ranks.folder.name, "store")).get("tries")
        # It waits by now, most likely.
        time.sleep(0.5)
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].result(30) == "KeyboardInterrupt"
        # Nothing is lost: the wait has taken no signal.
        ranks.run(signal_after_all)


def interrupted():
    try:
        here().store.set("tries", b"")
        kept[0].wait_signal(1)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def signal_after_all():
    handle = kept[0]
    if handle.rank == 1:
        handle.put_signal(0)
    else:
        handle.wait_signal(1)
    handle.barrier(1)


def test_waits_let_other_threads_run(pools):
    pools(2).run(check_threads)


def check_threads():
    group = here().group
    handle = symmetric.rendezvous(symmetric.empty(8), group)
    other = 1 - group.rank
    waiter = threading.Thread(target=handle.wait_signal, args=(other, 1), daemon=True)
    waiter.start()
    # On a channel of its own, this thread signals back and forth meanwhile.
    for _ in range(100):
        handle.put_signal(other, 2)
        handle.wait_signal(other, 2)
    assert waiter.is_alive()
    handle.barrier(3)
    handle.put_signal(other, 1)
    waiter.join(50)
    assert not waiter.is_alive()
    handle.barrier(3)


def test_come_and_go(pools):
    pools(2).run(check_come_and_go)


def check_come_and_go():
    group = here().group
    fds = None
    for round in range(120):
        mine = symmetric.empty(256, "uint8")
        with symmetric.rendezvous(mine, group) as handle:
            handle.buffer(1 - group.rank)[0] = round
            handle.barrier()
            assert mine[0] == round
            handle.barrier()
        del mine, handle
        if round == 40:
            fds = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_the_default_group(pools):
    with Ranks(2) as ranks:
        ranks.run(check_default)


def check_default():
    group = tensorwire.init(store=here().store, rank=here().rank, world=here().world, timeout=60)
    mine = symmetric.empty(16)
    mine[:] = 1
    symmetric.all_reduce(mine)
    assert (mine == 2).all()
    with symmetric.rendezvous(mine) as handle:
        handle.barrier()
        assert handle.world == group.world
    tensorwire.finalize()
    with pytest.raises(tensorwire.TensorwireError):
        handle.barrier()


def test_a_forked_child_has_memory_of_its_own(pools):
    pools(1).run(check_fork)


def check_fork():
    first = symmetric.empty(64, "uint8", name="of the parent")
    first[:] = 1
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            own = symmetric.empty(64, "uint8", name="of the parent")
            own[:] = 2
            code = 0 if own.ctypes.data != first.ctypes.data else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert (first == 1).all()


@pytest.mark.parametrize("world", WORLDS)
def test_together(pools, world):
    pools(world).run(check_together)


def check_together():
    group = here().group
    world, me, count = group.world, group.rank, 100
    size = count * world
    own = symmetric.empty(3 * size, "int32")
    given, placed, sent = own[:size], own[size : 2 * size], own[2 * size :]
    handle = symmetric.rendezvous(own, group)
    assert "can work together" in handle.explain()
    for round, engines in enumerate((False, True)):
        parts = [np.arange(size, dtype="int32") * 7 + 1000 * rank + 31 * round for rank in range(world)]
        given[:], sent[:], placed[:] = parts[me], parts[me] + 1, -1
        placed[count * me : count * (me + 1)] = parts[me][:count]
        one, reduced = np.empty(size, "int32"), np.empty(count, "int32")
        gathered, exchanged = np.empty(size, "int32"), np.empty(size, "int32")
        handle.barrier()
        handle.one_shot(one, given)
        handle.reduce_scatter(reduced, given, engines=engines)
        handle.all_gather(gathered, given[:count], channel=1, engines=engines)
        handle.all_gather(placed, engines=engines)
        handle.all_to_all(exchanged, given, engines=engines)
        handle.broadcast(sent, world - 1, engines=engines)
        handle.all_reduce(given, "max" if round else "sum")
        total, mine = sum(parts), slice(count * me, count * (me + 1))
        assert (one == total).all() and (reduced == total[mine]).all()
        assert (given == (parts[-1] if round else total)).all()
        first = np.concatenate([values[:count] for values in parts])
        assert (gathered == first).all() and (placed == first).all()
        assert (exchanged == np.concatenate([values[mine] for values in parts])).all()
        assert (sent == parts[-1] + 1).all()
        handle.barrier(1)
    handle.check()
    for call, words in (
        (lambda: handle.all_reduce(np.ones(4, "int32")), "does not lie in the memory"),
        (lambda: handle.all_reduce(own[::2]), "without gaps"),
        (lambda: handle.one_shot(np.empty(size, "float32"), given), "the output is of"),
        (lambda: handle.all_reduce(given, channel=4), "no channel"),
        (lambda: handle.broadcast(given, world), "no rank"),
        (lambda: handle.one_shot(own[1 : size + 1], given), "overlaps"),
    ):
        with pytest.raises(tensorwire.MisuseError, match=words):
            call()
    with pytest.raises(TypeError, match="nonsense"):
        handle.all_reduce(given, nonsense=1)
    handle.barrier()
    handle.close()


@pytest.mark.parametrize("world", [2, 3])
def test_together_without_one(pools, world):
    pools(world).run(check_together_without_one)


def check_together_without_one():
    group = here().group
    own = symmetric.empty(100, "int32")
    own[:] = group.rank
    handle = symmetric.rendezvous(own, group)
    handle.barrier()
    if group.rank + 1 < group.world:
        with pytest.raises(tensorwire.TimeoutError, match="all ranks make a new one") as caught:
            handle.all_reduce(own, timeout=0.3)
        assert caught.value.ranks == [group.world - 1]
    group.barrier()
    with pytest.raises(tensorwire.TimeoutError):
        handle.check()
    assert (own == group.rank).all()
    group.barrier()
    handle.close()
