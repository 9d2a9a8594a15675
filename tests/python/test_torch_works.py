"""Works and futures: what they say, when, and how errors come out of them."""

import asyncio
import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire  # noqa: E402


@on_ranks
def test_a_work_tells_the_truth(rank, size):
    tensor = torch.ones(4)
    if rank == 1:
        time.sleep(0.3)
    begin = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        # The other one is not here yet, unless this machine stopped us for long.
        assert not work.is_completed() or time.monotonic() - begin > 0.2
    assert work.wait() is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor
    assert tensor.tolist() == [2] * 4
    before = work._get_sequence_number()
    later = dist.all_reduce(tensor, async_op=True)
    later.wait()
    assert later._get_sequence_number() == before + 1
    assert dist.group.WORLD._get_sequence_number_for_group() == before + 1


@on_ranks
def test_durations_are_told_from_when_timing_is_enabled(rank, size):
    group, other = dist.new_group(), dist.new_group()
    tensor = torch.ones(4)
    early = dist.all_reduce(tensor, group=group, async_op=True)
    group._enable_collectives_timing()
    later = dist.all_reduce(tensor, group=group, async_op=True)
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(tensor, group=group)
    elsewhere = dist.all_reduce(tensor, group=other, async_op=True)
    for work in (early, later, elsewhere, manager.works[-1]):
        work.wait()
    assert later._get_duration() > 0 and manager.works[-1]._get_duration() > 0
    for work in (early, elsewhere):
        with pytest.raises(RuntimeError, match="getDuration only works if timing was enabled.*all_reduce"):
            work._get_duration()


@on_ranks
def test_a_work_that_was_waited_for_is_gone_from_torchs_registry(rank, size):
    """Works in flight are known to torch by their tensors, if a program wants that."""
    from torch._C._distributed_c10d import _get_work_registry_size as known
    from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx as noted

    wait_tensor = torch.ops._c10d_functional.wait_tensor
    tensor, other = torch.ones(4), torch.ones(4)
    assert known() == 0
    with noted():
        work = dist.all_reduce(tensor, async_op=True)
        assert known() == 1
        assert work.wait() and known() == 0
        # Of two works on a tensor, the one that was waited for.
        first, second, third = (dist.all_reduce(each, async_op=True) for each in (tensor, tensor, other))
        assert known() == 3
        first.wait()
        assert known() == 2
        wait_tensor(tensor)
        assert known() == 1 and second.is_completed() and tensor.tolist() == [8] * 4
        third.wait()
        assert known() == 0
        # One that is over when the call returns has none.
        dist.all_reduce(tensor)
        options = dist.AllreduceOptions()
        options.asyncOp = False
        assert dist.group.WORLD.allreduce([tensor], options) is None and not options.asyncOp
        assert known() == 0 and tensor.tolist() == [32] * 4
        wait_tensor(tensor)
        # All outputs are known.
        parts = [torch.empty(2) for _ in range(size)]
        work = dist.all_gather(parts, torch.ones(2), async_op=True)
        assert known() == size
        work.wait()
        # A wait whose own time is over leaves it there.
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(TimeoutError):
                work.wait(timedelta(milliseconds=50))
            assert known() == 1
            dist.distributed_c10d._get_default_store().set("registry", "looked")
            work.wait()
        else:
            dist.distributed_c10d._get_default_store().wait(["registry"], timedelta(seconds=60))
            dist.all_reduce(tensor)
    assert known() == 0
    work = dist.all_reduce(tensor, async_op=True)
    assert known() == 0
    work.wait()
    # One that fails.
    group = dist.new_group(timeout=timedelta(seconds=20))
    with noted():
        work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
        with pytest.raises(tensorwire.MismatchError):
            work.wait()
    assert known() == 0


@on_ranks
def test_an_operation_that_is_waited_for_leaves_no_work(rank, size):
    """torch asks a backend for that with asyncOp=False; by its own default there is a work."""
    group, tensor = dist.group.WORLD, torch.ones(4)
    options = dist.AllreduceOptions()
    assert options.asyncOp
    work = group.allreduce([tensor], options)
    work.wait()
    options.asyncOp = False
    assert group.allreduce([tensor], options) is None
    assert tensor.tolist() == [4] * 4
    with torch.profiler.profile():
        assert group.allreduce([tensor], options) is None
    assert tensor.tolist() == [8] * 4
    before = group._get_sequence_number_for_group()
    options = dist.BarrierOptions()
    options.asyncOp = False
    assert group.barrier(options) is None
    assert group._get_sequence_number_for_group() == before + 1


@on_ranks
def test_a_wait_may_have_a_limit_of_its_own(rank, size):
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.distributed_c10d._get_default_store().set("limit", "passed")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["limit"], timedelta(seconds=60))
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2] * 4


@on_ranks
def test_futures_complete_with_the_tensors(rank, size):
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert work.get_future() is not None
    (value,) = future.wait()
    assert value.data_ptr() == tensor.data_ptr() and value.tolist() == [2] * 4
    assert work.get_future().done()
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4] * 4
    outs = [torch.empty(2) for _ in range(size)]
    value = dist.all_gather(outs, torch.full((2,), float(rank)), async_op=True).get_future().wait()
    assert [part.tolist() for part in value] == [[0, 0], [1, 1]]
    # Asked for after the end.
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.get_future().wait()[0].tolist() == [4] * 4
    assert work.get_future_result().wait() == 0


@on_ranks
def test_a_callback_may_start_and_wait_for_more(rank, size):
    def more(future):
        other = future.value()[0].clone()
        dist.all_reduce(other)
        return other

    futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future().then(more) for _ in range(1)]
    assert [future.wait().tolist() for future in futures] == [[4]]


@on_ranks
def test_asyncio(rank, size):
    async def run():
        works = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(5)]
        return await asyncio.gather(*(work_of(work) for work in works))

    async def work_of(work):
        return await work

    results = asyncio.run(run())
    assert [tensors[0][0].item() for tensors in results] == [0, 2, 4, 6, 8]


@on_ranks
def test_other_threads_may_wait(rank, size):
    tensor = torch.ones(4)
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)


@on_ranks
def test_tensors_live_until_the_end_and_not_longer(rank, size):
    tensor = torch.ones(1000)
    seen = weakref.ref(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor
    gc.collect()
    assert seen() is not None
    work.wait()
    assert work.result()[0].sum() == 2000
    del work
    dist.barrier()
    gc.collect()
    assert seen() is None


@on_ranks
def test_many_works_in_flight(rank, size):
    works = [dist.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(200)]
    for i, work in enumerate(works):
        work.wait()
        assert work.result()[0][0] == 2 * i


@on_ranks
def test_a_mismatch_names_both_sides(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=20))
    tensor = torch.ones(3 + rank)
    with pytest.raises(tensorwire.MismatchError, match="rank 0.*rank 1|rank 1.*rank 0") as caught:
        dist.all_reduce(tensor, group=group)
    assert isinstance(caught.value, dist.DistBackendError)
    assert isinstance(caught.value, RuntimeError)


@on_ranks
def test_errors_come_out_of_waits_and_futures(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=20))
    work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="rank"):
        work.get_future().wait()
    with pytest.raises(dist.DistBackendError, match="rank"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), tensorwire.MismatchError)
    with pytest.raises(RuntimeError, match="rank"):
        work.get_future().then(lambda done: done.value()).wait()
    assert work.get_future_result().wait() == 2
    with pytest.raises(RuntimeError):
        asyncio.run(awaited(work))


async def awaited(work):
    return await work


@on_ranks
def test_a_receive_goes_on_when_its_work_is_dropped(rank, size):
    if rank == 0:
        tensors = [torch.zeros(3) for _ in range(2)]
        dist.irecv(tensors[0], 1)
        dist.irecv(tensors[1])
        gc.collect()
        dist.barrier()
        last = torch.zeros(3)
        dist.recv(last, 1)
        assert [tensor[0].item() for tensor in [*tensors, last]] == [1, 2, 3]
    else:
        dist.barrier()
        for i in range(1, 4):
            dist.send(torch.full((3,), float(i)), 0)
    dist.barrier()


@on_ranks
def test_a_cancelled_await_withdraws_receives(rank, size):
    """One alone, and one of several that are one work; a send goes on."""

    async def give_up(work):
        task = asyncio.ensure_future(awaited(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    if rank == 0:
        tensors = [torch.zeros(3) for _ in range(2)]
        alone = dist.irecv(tensors[0], 1)
        asyncio.run(give_up(alone))
        assert alone.is_completed() and isinstance(alone.exception(), tensorwire.AbortedError)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.irecv(tensors[1], 1)
            dist.isend(torch.full((3,), 5.0), 1)
        several = manager.works[-1]
        asyncio.run(give_up(several))
        with pytest.raises(tensorwire.AbortedError):
            several.wait()
        dist.barrier()
        got = torch.zeros(3)
        dist.recv(got, 1)
        assert got.tolist() == [7, 7, 7] and not torch.stack(tensors).any()
    else:
        dist.barrier()
        dist.send(torch.full((3,), 7.0), 0)
        got = torch.zeros(3)
        dist.recv(got, 0)
        assert got.tolist() == [5, 5, 5]
    dist.barrier()


@on_ranks
def test_memory_of_a_receive_that_nobody_knows_is_over_is_kept(rank, size):
    """It may still be withdrawn, and then its message is copied out of the tensor."""
    if rank == 0:
        tensor, got = torch.zeros(1000), torch.zeros(1000)
        work = dist.irecv(tensor, 1)
        while "in flight" in repr(work._flight):
            pass
        with pytest.raises(tensorwire.MisuseError, match="recv"):
            tensor.untyped_storage().resize_(1 << 20)
        assert work._flight.withdraw()
        tensor.untyped_storage().resize_(1 << 20)
        dist.recv(got, 1)
        assert got.sum() == 1000
    else:
        dist.send(torch.ones(1000), 0)
    dist.barrier()


@on_ranks
def test_a_barrier_behind_a_stream_that_is_not_there(rank, size):
    if torch.cuda.is_available():
        return
    for how in ({}, {"async_op": True}):
        with pytest.raises(tensorwire.UnsupportedError, match="(?i)gpu|cuda"):
            dist.barrier(device_ids=[0], **how)
    dist.barrier()


@on_ranks
def test_a_time_out_is_kept_and_says_who_is_missing(rank, size):
    group = dist.new_group(timeout=timedelta(milliseconds=500))
    if rank == 0:
        with pytest.raises(tensorwire.TimeoutError, match="rank 1") as caught:
            dist.all_reduce(torch.ones(3), group=group)
        assert isinstance(caught.value, dist.DistBackendError) and isinstance(caught.value, TimeoutError)
    dist.barrier()


@on_ranks
def test_a_new_time_out(rank, size):
    group = dist.new_group()
    group.set_timeout(timedelta(milliseconds=300))
    if rank == 0:
        with pytest.raises(TimeoutError):
            dist.barrier(group)
    dist.barrier()


@on_ranks
def test_abort_ends_what_others_wait_for(rank, size):
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()
    else:
        group.abort()
    with pytest.raises(RuntimeError, match="abort"):
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def wrong_calls(rank, size):
    """A call on a group, and torch's words for what is wrong with it. Each rank can tell alone."""
    peer = 1 - rank

    def tensors(*counts):
        return [torch.ones(count) for count in counts]

    def rooted(options, root):
        options.rootRank = root
        return options

    def single(out, into, *splits):
        return lambda group: dist.all_to_all_single(torch.ones(out), torch.ones(into), *splits, group=group)

    gather, scatter = dist.GatherOptions, dist.ScatterOptions
    yield single(3, 3), "Tensor's dim 0 does not divide equally across group size"
    yield single(4, 4, [1, 2], [2, 2]), "Split sizes doesn't match total dim 0 size"
    yield single(4, 4, [2, 2], [1, 2]), "Split sizes doesn't match total dim 0 size"
    yield single(4, 4, [1, 2, 1], [1, 2, 1]), "Number of tensor splits not equal to group size"
    yield single(4, 4, [5, -1], [5, -1]), "Split sizes must be non-negative"
    yield lambda group: dist.all_to_all(tensors(2), tensors(2), group), "input tensor list size 1 does not match world size 2"
    yield lambda group: dist.all_gather(tensors(2), torch.ones(2), group), "invalid output tensor list at index 0 (expected"
    into = "output tensor size must be equal to world_size times input tensor size"
    yield lambda group: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2), group), into
    times = "input tensor must be the same size as output size times world size"
    yield lambda group: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5), group=group), times
    parts = "invalid input tensor list size, must be world size"
    yield lambda group: dist.reduce_scatter(torch.ones(2), tensors(2), group=group), parts
    yield lambda group: group.broadcast(tensors(2), rooted(dist.BroadcastOptions(), 7)), "invalid root rank: 7"
    yield lambda group: group.reduce(tensors(2), rooted(dist.ReduceOptions(), -1)), "invalid root rank: -1"
    yield lambda group: group.gather([tensors(2, 2)], tensors(2), rooted(gather(), 7)), "invalid root rank: 7"
    yield lambda group: group.scatter(tensors(2), [tensors(2, 2)], rooted(scatter(), 7)), "invalid root rank: 7"
    yield lambda group: group.reduce(tensors(2, 2), dist.ReduceOptions()), "requires a single-element tensor list"
    yield lambda group: group.gather([tensors(2)], tensors(2, 2), gather()), "requires a single-element input tensor list"
    yield lambda group: group.scatter(tensors(2, 2), [tensors(2)], scatter()), "requires a single-element output tensor list"
    yield lambda group: group.allreduce(tensors(2, 3), dist.AllreduceOptions()), "invalid tensor size at index 1 (expected (2)"
    yield lambda group: group.send(tensors(2, 2), peer, 0), "send takes a single tensor"
    # Only the root has parts, and as many as there are ranks.
    one = "list containing a list with 2 tensors"
    yield lambda group: group.gather([tensors(2)], tensors(2), rooted(gather(), rank)), f"requires a single-element output {one}"
    yield lambda group: group.scatter(tensors(2), [tensors(2)], rooted(scatter(), rank)), f"requires a single-element input {one}"
    yield lambda group: group.gather([tensors(2, 2)], tensors(2), rooted(gather(), peer)), "requires empty output on non-root"
    yield lambda group: group.scatter(tensors(2), [tensors(2, 2)], rooted(scatter(), peer)), "requires empty input on non-root"


@on_ranks
def test_wrong_calls_are_told_in_torchs_words(rank, size):
    """Ours, which say more, come behind them."""
    group = dist.new_group()
    for call, words in wrong_calls(rank, size):
        with pytest.raises(tensorwire.MisuseError) as caught:
            call(group)
        text = str(caught.value)
        assert words in text and text.partition(": ")[2], text
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor == size
