"""Symmetric memory of ranks that share a GPU. `python tests/python/test_symmetric_cuda.py` runs it without pytest.

Each check runs on 2 and on 4 ranks, which are processes, and has a deadline. After one that fails the ranks are new.
"""

import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

#: How the ranks are set up: their variables.
SETTINGS = {
    "as it is": {},
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
WORLDS = (2, 4)
#: Seconds for one check.
LIMIT = 120
#: Some hundredths of a second of a GPU.
SHORT = 20_000_000
DEVICE = "cuda:0"


def has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


# Checks. They run on every rank.


class Here:
    """What each check needs."""

    def __init__(self):
        import ranks
        import torch

        from tensorwire import symmetric

        torch.cuda.set_device(DEVICE)
        self.torch, self.symmetric = torch, symmetric
        self.group = ranks.here().group
        self.rank, self.world = self.group.rank, self.group.world
        self.before, self.behind = (self.rank - 1) % self.world, (self.rank + 1) % self.world

    def empty(self, *shape, dtype=None):
        return self.symmetric.empty(shape, dtype or self.torch.float32, DEVICE)

    def meet(self, tensor):
        return self.symmetric.rendezvous(tensor, self.group)


def check_reach():
    it = Here()
    mine = it.empty(it.world, 1 << 16)
    assert mine.device == it.torch.device(DEVICE) and mine.dtype == it.torch.float32
    mine.fill_(-1)
    handle = it.meet(mine)
    assert (handle.rank, handle.world, handle.size) == (it.rank, it.world, mine.nbytes)
    # Streams: what this rank has filled is there before others write.
    handle.barrier()
    for rank in range(it.world):
        assert handle.access(rank) is True, handle.explain()
        theirs = handle.buffer(rank)
        assert theirs.device == mine.device and theirs.shape == mine.shape
        theirs[it.rank].fill_(10 * it.rank + rank)
    handle.barrier(1)
    want = [10.0 * rank + it.rank for rank in range(it.world)]
    assert mine[:, 0].tolist() == mine[:, -1].tolist() == want
    part = handle.buffer(it.behind, 5, offset=it.rank << 16)
    assert part.tolist() == [10.0 * it.rank + it.behind] * 5
    half = handle.buffer(it.behind, (2, 3), it.torch.bfloat16, offset=1)
    assert half.shape == (2, 3) and half.dtype == it.torch.bfloat16
    handle.barrier()
    assert handle.explain().count("gpu-") == it.world
    handle.close()


def check_addresses_and_pads():
    it = Here()
    mine = it.empty(64)
    handle = it.meet(mine)
    addresses, pads = handle.buffer_addresses, handle.pad_addresses
    for array, numbers in (addresses, handle.buffer_ptrs), (pads, handle.pad_ptrs):
        assert array.dtype == it.torch.int64 and array.device == mine.device
        assert array.tolist() == numbers and 0 not in numbers and len(set(numbers)) == it.world
    assert handle.buffer_ptrs[it.rank] == mine.data_ptr()
    pad = handle.pad(it.rank)
    assert pad.dtype == it.torch.uint32 and pad.tolist() == [0] * (it.symmetric.CHANNELS * it.world)
    handle.barrier()
    handle.pad(it.behind).view(it.torch.int32)[it.rank].fill_(it.rank + 1)
    handle.barrier()
    words = pad.tolist()
    assert words[it.before] == it.before + 1 and sum(words) == it.before + 1
    handle.barrier()


def check_signals_order_streams():
    """Nobody waits on the host: each round's data is written late and read at once."""
    it = Here()
    torch, mine = it.torch, it.empty(1 << 20)
    handle = it.meet(mine)
    got = []
    for round in range(20):
        torch.cuda._sleep(SHORT // (1 + round % 3))
        handle.buffer(it.behind).fill_(100 * it.rank + round)
        handle.put_signal(it.behind, 1)
        handle.wait_signal(it.before, 1)
        got.append(mine.clone())
        # The rank before may write again.
        handle.put_signal(it.before, 2)
        handle.wait_signal(it.behind, 2)
    for round, copy in enumerate(got):
        value = 100.0 * it.before + round
        assert copy[0].item() == copy[-1].item() == value and copy.double().sum().item() == value * copy.numel(), round
    handle.barrier()


def check_two_streams():
    it = Here()
    torch = it.torch
    mine = it.empty(2, 1 << 18)
    mine.fill_(0)
    handle = it.meet(mine)
    handle.barrier()
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(2)], [[], []]
    for round in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SHORT // 10 * (1 + (round + number + it.rank) % 3))
                handle.buffer(it.behind)[number].fill_(1000 * number + 100 * it.rank + round)
                handle.put_signal(it.behind, 2 * number)
                handle.wait_signal(it.before, 2 * number)
                got[number].append(mine[number].clone())
                handle.barrier(2 * number + 1)
    torch.cuda.synchronize()
    for number in range(2):
        for round, copy in enumerate(got[number]):
            value = 1000.0 * number + 100 * it.before + round
            assert copy.min().item() == copy.max().item() == value, (number, round)
    handle.barrier()


def check_a_stream_that_waits_in_vain():
    import tensorwire

    it = Here()
    mine = it.empty(64)
    mine.fill_(0)
    handle = it.meet(mine)
    if it.rank == 0:
        try:
            handle.wait_signal(1, timeout=0.2)
            it.torch.cuda.synchronize()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                handle.put_signal(1)
                time.sleep(0.01)
            raise AssertionError("no error")
        except tensorwire.TimeoutError as error:
            assert error.ranks == [1] and "rank 1" in str(error), error
    again = it.meet(mine)
    again.barrier()
    it.torch.cuda.synchronize()


def check_operations():
    it = Here()
    torch, symmetric, each = it.torch, it.symmetric, range(it.world)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for count in (1, 1000, 1 << 16, (1 << 20) + 3):
            one = it.empty(count, dtype=dtype)
            torch.cuda._sleep(SHORT // 10)
            one.fill_(it.rank + 1)
            symmetric.all_reduce(one, group=it.group)
            copy = one.clone()
            symmetric.all_reduce(one, "max", it.group).wait(60)
            total = sum(rank + 1 for rank in each)
            assert copy[0].item() == copy[-1].item() == total, (dtype, count)
            assert one[0].item() == one[-1].item() == total
    parts, part = it.empty(it.world, 30_000), it.empty(30_000)
    part.fill_(it.rank)
    symmetric.all_gather(parts, part, it.group)
    assert parts[:, 7].tolist() == [float(rank) for rank in each]
    for rank in each:
        parts[rank].fill_(it.rank + 10 * rank)
    symmetric.reduce_scatter(part, parts, group=it.group)
    assert part[-1].item() == sum(each) + 10 * it.rank * it.world
    got = it.empty(it.world, 30_000)
    symmetric.all_to_all(got, parts, it.group, async_op=True).wait(60)
    assert got[:, 0].tolist() == [rank + 10.0 * it.rank for rank in each]
    part.fill_(it.rank)
    symmetric.broadcast(part, it.world - 1, it.group)
    assert part[0].item() == it.world - 1
    # The result is in everybody's memory, and in a view with gaps.
    handle = it.meet(part)
    handle.barrier()
    assert handle.buffer(it.behind)[0].item() == it.world - 1
    handle.barrier()
    part.fill_(1)
    it.group.all_reduce(part[::2])
    assert part[:2].tolist() == [it.world, 1]
    refused(lambda: symmetric.all_reduce(torch.ones(3, device=DEVICE), group=it.group), "symmetric memory")
    part.fill_(it.rank)
    it.group.send(part, it.behind)
    it.group.recv(part, (it.rank - 1) % it.world)
    assert part[-1].item() == (it.rank - 1) % it.world
    it.group.barrier()


def check_named_memory():
    it = Here()
    first = it.symmetric.empty(1000, it.torch.float32, DEVICE, name="workspace")
    first.fill_(it.rank)
    address = first.data_ptr()
    del first
    again = it.symmetric.empty((10, 100), it.torch.int32, DEVICE, name="workspace")
    assert again.data_ptr() == address and again.view(it.torch.float32)[3, 3].item() == it.rank
    refused(lambda: it.symmetric.empty(7, device=DEVICE, name="workspace"), "4000 bytes")
    small = [it.empty(256) for _ in range(200)]
    assert len({tensor.data_ptr() >> 21 for tensor in small}) <= 3


def check_memory_is_kept_until_streams_are_done():
    """A rank drops its tensors at once, while its stream still reads its neighbour's memory, and takes new ones."""
    it = Here()
    torch, got = it.torch, []
    for round in range(8):
        mine = it.empty(1 << 20)
        mine.fill_(10 * round + it.rank)
        handle = it.meet(mine)
        handle.barrier()
        torch.cuda._sleep(SHORT)
        got.append(handle.buffer(it.behind).clone())
        handle.barrier(1)
        handle.close()
        del mine, handle
        it.empty(1 << 20).fill_(-1)
    for round, copy in enumerate(got):
        assert copy.min().item() == copy.max().item() == 10 * round + it.behind, round


def check_mem_pool():
    it = Here()
    torch, pool = it.torch, it.symmetric.mem_pool(DEVICE)
    assert it.symmetric.mem_pool(DEVICE) is pool
    with torch.cuda.use_mem_pool(pool):
        first, second = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
        torch.manual_seed(it.rank)
        model = torch.nn.Linear(256, 256, device=DEVICE)
    outside = torch.zeros(1000, device=DEVICE)
    assert abs(first.data_ptr() - second.data_ptr()) < 2 << 20, "small tensors share a segment"
    handle = it.meet(second)
    handle.barrier()
    handle.buffer(it.behind).fill_(it.rank + 1)
    handle.barrier()
    assert second[0].item() == second[-1].item() == it.before + 1 and first.abs().sum().item() == 0
    first.fill_(it.rank + 1)
    it.symmetric.all_reduce(first, group=it.group)
    assert first[-1].item() == sum(range(1, it.world + 1))
    for parameter in model.parameters():
        it.symmetric.broadcast(parameter.detach(), 0, it.group)
    total = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).sum()
    sums = torch.zeros(it.world, dtype=torch.float64)
    it.group.all_gather_into(sums, total.reshape(1).cpu())
    assert sums.min() == sums.max(), sums
    refused(lambda: it.symmetric.rendezvous(outside, it.group), "cannot map this memory")
    # Tensors that come and go, and segments that torch gives back.
    for _ in range(20):
        with torch.cuda.use_mem_pool(pool):
            large = torch.full((8 << 20,), 3.0, device=DEVICE)
        assert large[-1].item() == 3
        del large
    del first, second, model, parameter, total
    torch.cuda.empty_cache()
    handle.close()
    with torch.cuda.use_mem_pool(pool):
        again = torch.full((1 << 20,), 1.0, device=DEVICE)
    it.symmetric.all_reduce(again, group=it.group)
    assert again[-1].item() == it.world


def check_capture():
    """Signals and a rendezvous are refused by name while a graph is recorded; nothing of them is queued. Memory may be let go of."""
    it = Here()
    torch, mine, other = it.torch, it.empty(1000), it.empty(1000)
    handle = it.meet(mine)
    handle.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = {
        "put": lambda: handle.put_signal(it.behind, 3),
        "wait": lambda: handle.wait_signal(it.before, 3),
        "barrier": lambda: handle.barrier(4),
        "rendezvous": lambda: it.meet(other),
    }
    with torch.cuda.graph(graph):
        mine.add_(1)
        for call in calls.values():
            refused(call, "graph")
        # Dropped while the stream records.
        view = handle.buffer(it.rank)
        view.add_(1)
        del view
    mine.fill_(0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert mine.eq(6).all(), mine[:5]
    # All ranks are as before: no signal was counted.
    handle.put_signal(it.behind, 3)
    handle.wait_signal(it.before, 3)
    handle.barrier(4)
    torch.cuda.synchronize()
    handle.close()


def works_together(it, handle):
    """Whether kernels of all ranks run at once here; otherwise every such call is refused with the reason, and queues nothing."""
    if "can work together" in handle.explain():
        return True
    for call in (
        lambda: handle.all_reduce(handle.buffer(it.rank)),
        lambda: handle.broadcast(handle.buffer(it.rank), 0),
    ):
        refused(call, "without MPS")
    graph = it.torch.cuda.CUDAGraph()
    with it.torch.cuda.graph(graph):
        handle.buffer(it.rank).add_(0)
        refused(lambda: handle.all_reduce(handle.buffer(it.rank)), "without MPS")
    handle.barrier(7)
    return False


def all_together(it, handle, own, count, engines):
    """All operations of a handle on torch's current stream: own has three parts of `world * count` elements."""
    torch, world = it.torch, it.world
    given, placed, sent = own[: count * world], own[count * world : 2 * count * world], own[2 * count * world :]
    made = lambda size: torch.empty(size, dtype=own.dtype, device=DEVICE)  # noqa: E731
    results = made(count * world), made(count), made(count * world), made(count * world)
    one, reduced, gathered, exchanged = results
    how = {"engines": engines}
    handle.one_shot(one, given)
    handle.reduce_scatter(reduced, given, **how)
    handle.all_gather(gathered, given[:count], **how)
    handle.all_gather(placed, **how)
    handle.all_to_all(exchanged, given, **how)
    handle.broadcast(sent, world - 1, **how)
    handle.all_reduce(given)
    return results


def fill_own(it, own, count, round):
    """Gives what all ranks have filled in: of each rank its own three parts."""
    torch, world = it.torch, it.world
    at = torch.arange(count * world, device=DEVICE, dtype=torch.int64)
    parts = lambda rank: (at * 7 + 1000 * rank + 31 * round).to(own.dtype)  # noqa: E731
    own[: count * world] = parts(it.rank)
    own[count * world : 2 * count * world] = -1
    own[count * world + count * it.rank : count * world + count * (it.rank + 1)] = parts(it.rank)[:count]
    own[2 * count * world :] = parts(it.rank) + 1
    return [parts(rank) for rank in range(world)]


def check_all(it, own, count, results, given):
    torch, world, me = it.torch, it.world, it.rank
    one, reduced, gathered, exchanged = results
    total = torch.stack(given).sum(0).to(own.dtype)
    mine = slice(count * me, count * (me + 1))
    assert torch.equal(one, total) and torch.equal(own[: count * world], total)
    assert torch.equal(reduced, total[mine])
    first = torch.cat([values[:count] for values in given])
    assert torch.equal(gathered, first) and torch.equal(own[count * world : 2 * count * world], first)
    assert torch.equal(exchanged, torch.cat([values[mine] for values in given]))
    assert torch.equal(own[2 * count * world :], given[world - 1] + 1)


def check_together():
    """Operations whose kernels wait for those of the other ranks."""
    it = Here()
    for count in (1, 1000, 300_001):
        own = it.empty(3 * count * it.world, dtype=it.torch.int32)
        handle = it.meet(own)
        if not works_together(it, handle):
            return "refused with the reason: no MPS"
        for round, engines in enumerate((False, True)):
            given = fill_own(it, own, count, round)
            handle.barrier()
            results = all_together(it, handle, own, count, engines)
            check_all(it, own, count, results, given)
            handle.barrier(1)
        refused(lambda: handle.all_reduce(own[::2]), "without gaps")
        refused(lambda: handle.all_reduce(it.empty(8)), "does not lie in the memory")
        handle.check()
        handle.close()


def check_graphs():
    """A graph of torch with all operations is replayed 1,000 times, with one rank delayed at random; and it keeps the handle."""
    import random

    it = Here()
    torch, count = it.torch, 1000
    own = it.empty(3 * count * it.world, dtype=torch.int32)
    handle = it.meet(own)
    if not works_together(it, handle):
        return "refused with the reason: no MPS"
    for engines in False, True:
        fill_own(it, own, count, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = all_together(it, handle, own, count, engines)
        fate = random.Random(3)
        for round in range(500):
            given = fill_own(it, own, count, round)
            handle.barrier()
            torch.cuda.synchronize()
            delayed, pause = fate.randrange(it.world), fate.random() / 1000
            if delayed == it.rank and round % 3 == 0:
                time.sleep(pause)
            graph.replay()
            if round % 10 == 0:
                # Nothing but its own results is left of what a replay works on.
                junk = [torch.full((count * it.world,), -7, dtype=torch.int32, device=DEVICE) for _ in range(4)]
                del junk
            check_all(it, own, count, results, given)
            handle.check()
            handle.barrier(1)
        del graph, results
    # Nobody but the graph has the handle now.
    fill_own(it, own, count, 0)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        results = all_together(it, handle, own, count, False)
    again = it.meet(own)
    handle.close()
    del handle
    gc.collect()
    for round in range(20):
        given = fill_own(it, own, count, round)
        again.barrier()
        graph.replay()
        check_all(it, own, count, results, given)
        again.barrier(1)
    del graph
    torch.cuda.synchronize()
    again.barrier(2)
    again.close()


def check_a_replay_that_nobody_joins():
    """The last rank does not replay: the others hear of it, and later replays write nothing and wait for nobody."""
    import tensorwire

    it = Here()
    torch = it.torch
    own = it.empty(1000, dtype=torch.int32)
    own.fill_(it.rank + 1)
    handle = it.meet(own)
    if not works_together(it, handle):
        return "refused with the reason: no MPS"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle.all_reduce(own, timeout=0.3)
    handle.barrier()
    torch.cuda.synchronize()
    last = it.rank + 1 == it.world

    def fails():
        try:
            handle.check()
        except tensorwire.TimeoutError as error:
            assert "all ranks make a new one" in str(error), error
            return
        raise AssertionError("no error")

    if not last:
        graph.replay()
        torch.cuda.synchronize()
        fails()
    it.group.barrier()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        fails()
    assert own.eq(it.rank + 1).all(), "it was written to"
    it.group.barrier()
    del graph
    handle.close()
    again = it.meet(own)
    again.all_reduce(own)
    assert own[0].item() == sum(range(1, it.world + 1))
    again.barrier()


def check_a_kernel_of_triton():
    """It reads the memory of all ranks through the array of addresses."""
    try:
        import symmetric_kernel
    except ImportError as error:
        return f"skipped: {error}"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "skipped: Triton needs a C compiler"
    it = Here()
    mine, out = it.empty((1 << 18) + 5), it.torch.empty((1 << 18) + 5, device=DEVICE)
    handle = it.meet(mine)
    addresses = handle.buffer_addresses
    for round in range(5):
        mine.fill_(round + it.rank)
        handle.barrier()
        symmetric_kernel.launch(addresses, out, it.world)
        handle.barrier()
        want = sum(round + rank for rank in range(it.world))
        assert out.min().item() == out.max().item() == want, (round, want)


def refused(call, words):
    import tensorwire

    try:
        call()
    except tensorwire.TensorwireError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


CHECKS = [name for name in globals() if name.startswith("check_")]


# The program.


def run_setting(variables):
    """All checks with these variables; gives how many failed."""
    import ranks
    import test_symmetric_cuda as checks

    failed = 0
    for world in WORLDS:
        pool = None
        for name in CHECKS:
            begin, end = time.monotonic(), "ok"
            if pool is None:
                pool = ranks.Ranks(world, variables)
            try:
                said = pool.run(getattr(checks, name), timeout=LIMIT)
                end = said[0] or end
            except ranks.RankFailed as error:
                end, failed = f"FAILED\n{error}", failed + 1
                pool.close()
                pool = None
            print(f"  {world} ranks: {name}: {end} ({time.monotonic() - begin:.1f} s)", flush=True)
        if pool is not None:
            pool.close()
    return failed


def main():
    if not has_gpu():
        print("no GPU, or no torch: skipped")
        return 0
    # Triton's own cache may be in a folder that cannot be written.
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        failed = 0
        for name, variables in SETTINGS.items():
            print(name, flush=True)
            failed += run_setting(variables)
    print("test result: ok" if failed == 0 else f"test result: FAILED, {failed} checks", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
elif "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not has_gpu(), reason="no GPU")
    @pytest.mark.timeout(2 * len(CHECKS) * LIMIT)
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_on_a_gpu(setting):
        assert run_setting(SETTINGS[setting]) == 0
