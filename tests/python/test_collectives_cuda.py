"""Collectives on CUDA tensors through torch.distributed. `python tests/python/test_collectives_cuda.py` runs it without pytest.

Ranks are processes that share GPU 0. Each check has a deadline and prints a line. When one fails, the ranks are started
again with the checks behind it. `--cpu` runs what needs no GPU on CPU tensors: to see that the program itself is right.
`--quick` runs them with three ranks alone, and `--no-kills` kills nobody. Words choose checks by parts of their names.
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from datetime import timedelta

#: How torch's allocator takes memory: variables of the ranks.
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
#: Seconds for one check, and for an operation.
LIMIT, PATIENCE = 60, 30
#: Some tenths of a second of a GPU.
LONG = 200_000_000


def has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


class Rank:
    """What a check works with."""

    def __init__(self, rank, world, device):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.world, self.device = torch, dist, rank, world, device
        self.on_gpu = device != "cpu"
        self.types = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

    def input(self, of, shape, dtype, salt=0):
        """What a rank gives, as every rank can make it: small numbers, whose sums are exact in every type."""
        numbers = self.torch.arange(self.torch.Size(shape).numel()) * 7 + of * 3 + salt
        return (numbers % (2 if dtype == self.torch.bool else 5)).to(dtype).view(shape)

    def mine(self, shape, dtype, salt=0):
        return self.input(self.rank, shape, dtype, salt).to(self.device)

    def inputs(self, shape, dtype, salt=0):
        return [self.input(of, shape, dtype, salt) for of in range(self.world)]

    def same(self, tensor, expected, what):
        got = tensor.cpu()
        if not self.torch.equal(got, expected):
            bad = (got != expected).flatten().nonzero().flatten()
            first = bad[:5].tolist()
            raise AssertionError(
                f"{what}: {bad.numel()} of {got.numel()} elements are wrong, from {first} on: "
                f"{got.flatten()[bad[:5]].tolist()}, not {expected.flatten()[bad[:5]].tolist()}"
            )

    def finish(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def refused(self, call, *words):
        """The error of a call that must be refused."""
        try:
            call()
        except Exception as error:
            text = str(error)
            assert all(word in text for word in words), f"{type(error).__name__}: {text}"
            return text
        raise AssertionError("not refused")

    def say(self, text):
        if self.rank == 0:
            print("\n".join(f"say {line}" for line in text.splitlines()), flush=True)


def total(inputs):
    result = inputs[0].clone()
    for other in inputs[1:]:
        result = result + other
    return result.to(inputs[0].dtype)


# Checks of every operation, against results that are computed on the CPU.


def check_all_reduce(it):
    for dtype in it.types:
        for count in (1, 5, 1000, 300_007):
            tensor = it.mine((count,), dtype)
            it.dist.all_reduce(tensor)
            it.same(tensor, total(it.inputs((count,), dtype)), f"{count} of {dtype}")
    it.dist.all_reduce(it.mine((0,), it.torch.float32))


def check_reductions(it):
    torch, ops = it.torch, it.dist.ReduceOp
    table = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8):
        for name, combine in (table if dtype.is_floating_point else table | bits).items():
            tensor = it.mine((1003,), dtype, 1)
            it.dist.all_reduce(tensor, getattr(ops, name))
            inputs = it.inputs((1003,), dtype, 1)
            expected = inputs[0]
            for other in inputs[1:]:
                expected = combine(expected, other)
            it.same(tensor, expected, f"{name} of {dtype}")
    tensor = it.mine((1003,), torch.float32)
    it.dist.all_reduce(tensor, ops.AVG)
    it.same(tensor, total(it.inputs((1003,), torch.float32)) / it.world, "AVG")
    tensor = it.mine((1003,), torch.complex64)
    it.dist.all_reduce(tensor)
    it.same(tensor, total(it.inputs((1003,), torch.complex64)), "complex64")


def check_reduce_and_broadcast(it):
    for dtype in it.types:
        for root in {0, it.world - 1}:
            tensor = it.mine((5000,), dtype)
            it.dist.reduce(tensor, root)
            expected = total(it.inputs((5000,), dtype)) if it.rank == root else it.input(it.rank, (5000,), dtype)
            it.same(tensor, expected, f"reduce of {dtype} to {root}")
            tensor = it.mine((5000,), dtype)
            it.dist.broadcast(tensor, root)
            it.same(tensor, it.input(root, (5000,), dtype), f"broadcast of {dtype} from {root}")


def check_gathers(it):
    torch, dist = it.torch, it.dist
    for dtype in it.types:
        inputs = it.inputs((700,), dtype)
        whole = torch.empty(700 * it.world, dtype=dtype, device=it.device)
        dist.all_gather_into_tensor(whole, it.mine((700,), dtype))
        it.same(whole, torch.cat(inputs), f"all_gather_into_tensor of {dtype}")
        parts = [torch.empty(700, dtype=dtype, device=it.device) for _ in range(it.world)]
        dist.all_gather(parts, it.mine((700,), dtype))
        for of, part in enumerate(parts):
            it.same(part, inputs[of], f"all_gather of {dtype}")
        root = it.world - 1
        parts = [torch.empty(700, dtype=dtype, device=it.device) for _ in range(it.world)] if it.rank == root else None
        dist.gather(it.mine((700,), dtype), parts, root)
        for of, part in enumerate(parts or []):
            it.same(part, inputs[of], f"gather of {dtype}")


def check_scatters(it):
    torch, dist = it.torch, it.dist
    for dtype in it.types:
        output = torch.empty(300, dtype=dtype, device=it.device)
        dist.reduce_scatter_tensor(output, it.mine((300 * it.world,), dtype))
        expected = total(it.inputs((300 * it.world,), dtype)).chunk(it.world)[it.rank]
        it.same(output, expected, f"reduce_scatter_tensor of {dtype}")
        output = torch.empty(300, dtype=dtype, device=it.device)
        dist.reduce_scatter(output, [it.mine((300,), dtype, to) for to in range(it.world)])
        it.same(output, total(it.inputs((300,), dtype, it.rank)), f"reduce_scatter of {dtype}")
        parts = [it.input(to, (300,), dtype, 4).to(it.device) for to in range(it.world)] if it.rank == 0 else None
        output = torch.empty(300, dtype=dtype, device=it.device)
        dist.scatter(output, parts, 0)
        it.same(output, it.input(it.rank, (300,), dtype, 4), f"scatter of {dtype}")


def check_all_to_all(it):
    torch, dist = it.torch, it.dist
    for dtype in it.types:
        output = torch.empty(50 * it.world, dtype=dtype, device=it.device)
        dist.all_to_all_single(output, it.mine((50 * it.world,), dtype))
        parts = [whole.chunk(it.world)[it.rank] for whole in it.inputs((50 * it.world,), dtype)]
        it.same(output, torch.cat(parts), f"all_to_all_single of {dtype}")
        # Uneven: rank i gives i + 2 j + 1 elements to rank j.
        sizes = [[of + 2 * to + 1 for to in range(it.world)] for of in range(it.world)]
        gets = [row[it.rank] for row in sizes]
        output = torch.empty(sum(gets), dtype=dtype, device=it.device)
        source = it.mine((sum(sizes[it.rank]),), dtype)
        dist.all_to_all_single(output, source, gets, sizes[it.rank])
        wholes = [it.input(of, (sum(sizes[of]),), dtype) for of in range(it.world)]
        parts = [whole.split(sizes[of])[it.rank] for of, whole in enumerate(wholes)]
        it.same(output, torch.cat(parts), f"uneven all_to_all_single of {dtype}")
        outputs = [torch.empty(size, dtype=dtype, device=it.device) for size in gets]
        dist.all_to_all(outputs, list(source.split(sizes[it.rank])))
        for output, part in zip(outputs, parts, strict=True):
            it.same(output, part, f"all_to_all of {dtype}")


def check_coalesced(it):
    torch, dist = it.torch, it.dist
    tensors = [it.mine((size,), torch.float32, size) for size in (3, 1000, 70_000)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        it.same(tensor, total(it.inputs(tensor.shape, torch.float32, tensor.numel())), "all_reduce_coalesced")
    tensors = [it.mine((size,), torch.float32, size) for size in (3, 1000, 70_000)]
    with dist._coalescing_manager(device=torch.device(it.device), async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    for tensor in tensors:
        it.same(tensor, total(it.inputs(tensor.shape, torch.float32, tensor.numel())), "coalescing manager")


def check_strided(it):
    torch, dist = it.torch, it.dist
    for view in (lambda t: t.t(), lambda t: t[::2, 1::3], lambda t: t[:, 3], lambda t: t[1:3], lambda t: t[2, 4]):
        base = it.mine((40, 60), torch.float32)
        dist.all_reduce(view(base))
        expected = it.input(it.rank, (40, 60), torch.float32)
        view(expected).copy_(view(total(it.inputs((40, 60), torch.float32))))
        it.same(base, expected, "all_reduce of a view")
        base = it.mine((40, 60), torch.float32)
        dist.broadcast(view(base), 0)
        expected = it.input(it.rank, (40, 60), torch.float32)
        view(expected).copy_(view(it.input(0, (40, 60), torch.float32)))
        it.same(base, expected, "broadcast of a view")
    wide = torch.zeros(it.world * 5, 7, device=it.device)
    dist.all_gather_into_tensor(wide[:, :3], it.mine((5, 6), torch.float32)[:, ::2])
    parts = [whole[:, ::2] for whole in it.inputs((5, 6), torch.float32)]
    it.same(wide[:, :3], torch.cat(parts), "all_gather of views")
    it.same(wide[:, 3:], torch.zeros(it.world * 5, 4), "what lies beside a view")


def check_large(it):
    for count in (8 << 20, 40 << 20):
        tensor = it.torch.full((count,), float(it.rank + 1), device=it.device)
        tensor[:: 1 << 16] = float(10 * it.rank)
        it.dist.all_reduce(tensor)
        expected = it.torch.full((count,), it.world * (it.world + 1) / 2, device=it.device)
        expected[:: 1 << 16] = float(sum(10 * rank for rank in range(it.world)))
        wrong = (tensor != expected).sum().item()
        assert wrong == 0, f"{wrong} of {count} elements are wrong"


def check_many(it):
    """More operations than may be under way at once, on tensors that come and go."""
    kept = []
    for round in range(200):
        tensor = it.torch.full((1000 + round,), float(it.rank + round), device=it.device)
        it.dist.all_reduce(tensor)
        kept.append(tensor)
        del tensor
    for round, tensor in enumerate(kept):
        expected = sum(rank + round for rank in range(it.world))
        it.same(tensor, it.torch.full((1000 + round,), float(expected)), f"round {round}")


# Streams.


def check_stream_order(it):
    """Inputs come late on the stream; results are used behind it, and the host does not wait."""
    torch = it.torch
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for round in range(5):
                tensor = torch.zeros(100_000, device=it.device)
                it.finish()
                if it.rank == round % it.world:
                    torch.cuda._sleep(LONG // 2)
                tensor.fill_(it.rank + 1)
                begin = time.perf_counter()
                it.dist.all_reduce(tensor)
                took = time.perf_counter() - begin
                copy = tensor * 2
                expected = it.world * (it.world + 1)
                it.same(copy, torch.full((100_000,), float(expected)), f"round {round} on {stream}")
            it.say(f"a call took {took * 1e6:.0f} us on stream {stream.cuda_stream:#x}")


def check_async(it):
    torch, dist = it.torch, it.dist
    for round in range(10):
        tensor = torch.zeros(100_000, device=it.device)
        if it.on_gpu and it.rank == round % it.world:
            torch.cuda._sleep(LONG // 4)
        tensor.fill_(it.rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        it.same(tensor, torch.full((100_000,), it.world * (it.world + 1) / 2), "wait")
        until(work.is_completed)
        assert work.is_success() and work.exception() is None
        assert work.result()[0] is tensor
    # On another stream than the one that began it.
    if it.on_gpu:
        stream = torch.cuda.Stream()
        tensor = torch.ones(100_000, device=it.device)
        torch.cuda._sleep(LONG // 4)
        work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(stream):
            work.wait()
            it.same(tensor.clone(), torch.full((100_000,), float(it.world)), "another stream")
    tensor = torch.ones(100_000, device=it.device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait(timedelta(seconds=PATIENCE))
    assert work.is_completed()
    it.same(tensor, torch.full((100_000,), float(it.world)), "wait with a time-out")
    tensors = [torch.ones(1000 + at, device=it.device) for at in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.synchronize()
        it.same(tensor, torch.full((tensor.numel(),), float(it.world)), "many at once")


def check_futures(it):
    torch, dist = it.torch, it.dist
    for round in range(10):
        tensor = torch.zeros(100_000, device=it.device)
        if it.on_gpu and it.rank == round % it.world:
            torch.cuda._sleep(LONG // 4)
        tensor.fill_(it.rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future().then(lambda future: future.value()[0] * 2)
        it.same(future.wait(), torch.full((100_000,), float(it.world * (it.world + 1))), "a future")


def check_barrier(it):
    tensor = it.torch.ones(1000, device=it.device)
    if it.rank == 0 and it.on_gpu:
        it.torch.cuda._sleep(LONG)
    tensor.add_(1)
    event = it.torch.cuda.Event() if it.on_gpu else None
    if event is not None:
        event.record()
    it.dist.barrier(device_ids=[0] if it.on_gpu else None)
    assert event is None or event.query(), "the barrier did not wait for the stream"
    it.dist.barrier()
    work = it.dist.barrier(async_op=True)
    work.wait()


def check_barrier_behind_streams(it):
    """It starts behind the stream, and its time-out counts."""
    torch, dist = it.torch, it.dist
    # What is needed once is there: opening the GPU takes as long as the sleep below.
    dist.barrier(device_ids=[0])
    it.finish()
    dist.barrier()
    event = torch.cuda.Event()
    if it.rank == 0:
        torch.cuda._sleep(LONG)
    event.record()
    begin = time.monotonic()
    work = dist.barrier(async_op=True, device_ids=[0])
    took = time.monotonic() - begin
    assert it.rank != 0 or not event.query(), f"the call has waited for the stream, {took:.3f} s"
    work.wait()
    assert event.query(), "the barrier did not wait for the stream"
    # Some seconds of the GPU, and a tenth of a second for them.
    if it.rank == 0:
        for _ in range(20):
            torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    group = dist.group.WORLD.operations.group
    if it.rank == 0:
        text = it.refused(lambda: group._barrier_behind([0], timeout=0.1), "queue of this rank")
        assert not event.query(), "it has waited for the stream"
    else:
        text = it.refused(group.barrier, "rank 0")
    it.say(text)
    it.finish()
    dist.barrier()


def check_premul_sum(it):
    """The factor is multiplied in before the sum, in every type that has fractions."""
    torch = it.torch
    for dtype, factor in ((torch.float32, 0.5), (torch.bfloat16, 2.0), (torch.float64, 0.25), (torch.complex64, 2.0)):
        tensor = it.mine((1003,), dtype)
        it.dist.all_reduce(tensor, torch._C._distributed_c10d._make_nccl_premul_sum(factor))
        expected = total([part * factor for part in it.inputs((1003,), dtype)])
        it.same(tensor, expected, f"{factor} times {dtype}")
    output = torch.empty(300, device=it.device)
    op = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    it.dist.reduce_scatter_tensor(output, it.mine((300 * it.world,), torch.float32), op)
    expected = total(it.inputs((300 * it.world,), torch.float32)).chunk(it.world)[it.rank] * 0.5
    it.same(output, expected, "reduce_scatter_tensor")


def check_sync_batch_norm(it):
    """Batches of different sizes are normalised together: outputs and gradients of one rank that has them all."""
    torch = it.torch

    def batch(of):
        torch.manual_seed(10 + of)
        return torch.randn(3 + of, 5, 4)

    torch.manual_seed(1)
    alone = torch.nn.BatchNorm1d(5).to(it.device)
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(5)).to(it.device)
    synced.load_state_dict(alone.state_dict())
    whole = torch.cat([batch(of) for of in range(it.world)]).to(it.device).requires_grad_()
    mine = batch(it.rank).to(it.device).requires_grad_()
    every, own = alone(whole), synced(mine)
    rows = slice(sum(3 + of for of in range(it.rank)), sum(3 + of for of in range(it.rank + 1)))
    torch.testing.assert_close(own, every[rows])
    (every**3).sum().backward()
    (own**3).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[rows], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(synced.running_var, alone.running_var)
    # In a model under DDP, as programs have it.
    model = torch.nn.Sequential(torch.nn.Conv1d(5, 5, 1), torch.nn.BatchNorm1d(5)).to(it.device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replica = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    (replica(batch(it.rank).to(it.device)) ** 3).sum().backward()
    weight = model[0].weight.grad
    others = [torch.empty_like(weight) for _ in range(it.world)]
    it.dist.all_gather(others, weight)
    assert all(torch.equal(other, weight) for other in others)


def check_device_mesh(it):
    """Functional collectives over the dimensions of a mesh."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    torch, kind = it.torch, "cuda" if it.on_gpu else "cpu"
    mesh = init_device_mesh(kind, (1, it.world), mesh_dim_names=("one", "all"))
    group = mesh["all"]
    tensor = it.mine((6 * it.world,), torch.float32)
    inputs = it.inputs((6 * it.world,), torch.float32)
    it.same(functional.all_reduce(tensor, "sum", group) + 0, total(inputs), "all_reduce")
    it.same(functional.all_reduce(tensor, "max", mesh["one"]) + 0, inputs[it.rank], "all_reduce of one rank")
    it.same(functional.all_gather_tensor(tensor, 0, group) + 0, torch.cat(inputs), "all_gather_tensor")
    wide = tensor.view(2, 3 * it.world)
    both = functional.all_gather_tensor(wide, 1, group) + 0
    it.same(both, torch.cat([part.view(2, 3 * it.world) for part in inputs], 1), "all_gather_tensor of columns")
    part = functional.reduce_scatter_tensor(tensor, "avg", 0, group) + 0
    it.same(part, (total(inputs) / it.world).chunk(it.world)[it.rank], "reduce_scatter_tensor")
    part = functional.reduce_scatter_tensor(wide, "sum", 1, group) + 0
    expected = total([other.view(2, 3 * it.world) for other in inputs]).chunk(it.world, 1)[it.rank]
    it.same(part, expected, "reduce_scatter_tensor of columns")
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


def check_fsdp2(it):
    """The same parameters as on one rank that has the data of all."""
    import copy

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch = it.torch
    torch.manual_seed(2)
    layers = [torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)]
    alone = torch.nn.Sequential(*layers).to(it.device)
    sharded = copy.deepcopy(alone)
    mesh = init_device_mesh("cuda" if it.on_gpu else "cpu", (it.world,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (alone, sharded)]
    for step in range(5):
        data = []
        for of in range(it.world):
            torch.manual_seed(100 * step + of)
            data.append(torch.randn(8, 7).to(it.device))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([alone(each).square().mean() for each in data]).mean().backward()
        sharded(data[it.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for expected, parameter in zip(alone.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-3, atol=1e-4)


def check_registry(it):
    """Works are known to torch by their tensors until somebody has waited for them."""
    from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx as noted

    torch, dist = it.torch, it.dist
    known = torch._C._distributed_c10d._get_work_registry_size
    tensor = torch.ones(1000, device=it.device)
    with noted():
        first, second = (dist.all_reduce(tensor, async_op=True) for _ in range(2))
        assert known() == 2
        first.wait()
        assert known() == 1
        torch.ops._c10d_functional.wait_tensor(tensor)
        dist.all_reduce(tensor)
        assert known() == 0
    it.same(tensor, torch.full((1000,), float(it.world**3)), "three all-reduces")


def check_profiles(it):
    """A profile holds the host until the work is queued, and no longer. emit_nvtx() gets ranges."""
    torch, dist = it.torch, it.dist
    activities = [torch.profiler.ProfilerActivity.CPU]
    tensor = torch.ones(1000, device=it.device)
    for async_op in (False, True):
        work = dist.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
    it.finish()
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda._sleep(3 * LONG)
        event = torch.cuda.Event()
        event.record()
        for async_op in (False, True):
            work = dist.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()
        # Where a stream cannot wait, the thread does.
        one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        if not one_queue and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            assert not event.query(), "the profile has held the host"
        it.finish()
        # Its spans end on another thread.
        time.sleep(0.2)
    spans = [event for event in profile.events() if event.name == "tensorwire:all_reduce"]
    assert len(spans) == 2, spans
    it.say(f"spans of {[round(span.time_range.elapsed_us()) for span in spans]} us")
    with torch.autograd.profiler.emit_nvtx():
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    it.same(tensor, torch.full((1000,), float(it.world**4)), "four all-reduces")


def check_tensors_are_let_go(it):
    """Memory of a tensor that nobody else has is free soon after the operation, without another call."""
    torch = it.torch
    it.finish()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for async_op in (False, True):
        tensor = torch.ones(4 << 20, device=it.device)
        work = it.dist.all_reduce(tensor, async_op=async_op)
        del tensor, work
        until(lambda: torch.cuda.memory_allocated() <= before)


# Memory.


def check_new_memory_at_an_old_address(it):
    """Memory is given back to the driver and allocated again, at the same address, in a loop."""
    torch, addresses = it.torch, []
    for round in range(20):
        tensor = torch.full((12 << 20,), float(it.rank + round), device=it.device)
        addresses.append(tensor.data_ptr())
        it.dist.all_reduce(tensor)
        expected = float(sum(rank + round for rank in range(it.world)))
        assert tensor.eq(expected).all().item(), f"round {round}: {tensor[:5].tolist()}, not {expected}"
        allocated = torch.cuda.memory_allocated()
        del tensor
        until(lambda: torch.cuda.memory_allocated() < allocated)
        torch.cuda.empty_cache()
    it.say(f"{len(set(addresses))} addresses for {len(addresses)} tensors")


def check_memory_comes_back(it):
    """After empty_cache the GPU has its memory back soon, though another rank had it mapped."""
    torch = it.torch

    def free():
        return torch.cuda.mem_get_info()[0]

    torch.cuda.empty_cache()
    it.dist.barrier()
    before = free()
    tensors = [torch.ones(32 << 20, device=it.device) for _ in range(4)]
    for tensor in tensors:
        it.dist.all_reduce(tensor)
    it.finish()
    it.dist.barrier()
    used = before - free()
    allocated = torch.cuda.memory_allocated()
    del tensor, tensors
    until(lambda: torch.cuda.memory_allocated() <= allocated - 4 * (128 << 20))
    torch.cuda.empty_cache()
    it.dist.barrier()
    begin = time.monotonic()
    until(lambda: free() >= before - (64 << 20))
    it.say(f"{used >> 20} MiB were used; {(before - free()) >> 20} MiB after {time.monotonic() - begin:.2f} s")
    it.dist.barrier()


def check_training(it):
    """Steps of DDP: the same losses as with Gloo."""
    torch, dist = it.torch, it.dist
    gloo = dist.new_group(backend="gloo")
    losses = {}
    for name, group in (("gloo", gloo), ("tensorwire", None)):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)]
        model = torch.nn.Sequential(*layers).to(it.device)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        losses[name] = []
        for step in range(8):
            torch.manual_seed(100 * step + it.rank)
            x = torch.randn(32, 64).to(it.device)
            loss = (ddp(x).squeeze() - x.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    it.say(f"losses {losses['tensorwire'][:3]}; Gloo {losses['gloo'][:3]}")
    pairs = zip(losses["gloo"], losses["tensorwire"], strict=True)
    assert all(abs(one - other) <= 1e-4 * max(abs(one), 1) for one, other in pairs), losses


# Sparse tensors.


def check_sparse(it):
    """Every layout, type and operation, against dense tensors; CPU and CUDA tensors in one call, too."""
    torch, dist = it.torch, it.dist

    def has(of, shape, salt):
        """Which rows a rank has: different ones, some of them everywhere, none with the last salt."""
        return [row for row in range(shape[0]) if salt < 5 and (row % 4 == 0 or (row + of + salt) % 3 == 0)]

    def dense(of, shape, dtype, salt):
        tensor = torch.zeros(shape, dtype=dtype)
        rows = has(of, shape, salt)
        tensor[rows] = it.input(of, (len(rows), *shape[1:]), dtype, salt) + 1
        return tensor

    layouts = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}
    for salt, (name, to) in enumerate(layouts.items()):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
            mine = to(dense(it.rank, (50, 7), dtype, salt).to(it.device))
            expected = total([dense(of, (50, 7), dtype, salt) for of in range(it.world)])
            kept, layout = mine, mine.layout
            dist.all_reduce(mine)
            assert mine is kept and mine.layout is layout and mine.device.type == torch.device(it.device).type
            it.same(mine.to_dense(), expected, f"{name} of {dtype}")
    # Dense dimensions, one that is not coalesced, none on any rank, and MAX of what is there.
    for salt in (0, 5):
        rows = has(it.rank, (40, 3), salt)
        values = it.input(it.rank, (len(rows), 3), torch.float32, salt) + 1
        twice = torch.sparse_coo_tensor(
            torch.tensor([rows + rows[::-1]], dtype=torch.int64), torch.cat([values, values.flip(0)]), (40, 3)
        ).to(it.device)
        dist.all_reduce(twice)
        assert twice.is_coalesced()
        expected = torch.zeros(40, 3)
        for of in range(it.world):
            theirs = has(of, (40, 3), salt)
            expected[theirs] += 2 * (it.input(of, (len(theirs), 3), torch.float32, salt) + 1)
        it.same(twice.to_dense(), expected, "rows that are there twice")
    most = dense(it.rank, (50, 7), torch.float32, 1).to_sparse(1).to(it.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    it.same(most.to_dense(), torch.stack([dense(of, (50, 7), torch.float32, 1) for of in range(it.world)]).amax(0), "MAX")
    # Some ranks have nothing, and more than one tensor of a rank is added up first.
    few = dense(it.rank, (50, 7), torch.float32, 2).to_sparse(1).to(it.device)
    few = few if it.rank else torch.zeros(50, 7, device=it.device).to_sparse(1)
    work = dist.group.WORLD.allreduce([few])
    work.wait()
    it.same(few.to_dense(), total([dense(of, (50, 7), torch.float32, 2) for of in range(1, it.world)] or [torch.zeros(50, 7)]), "nothing on rank 0")


def check_sparse_in_stream_order(it):
    """What is queued before counts; a started one, and on a stream of one's own."""
    torch, dist = it.torch, it.dist
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            keys = torch.arange(1000, device=it.device).view(1, -1) * 3 + it.rank
            values = torch.zeros(1000, 16, device=it.device)
            torch.cuda._sleep(LONG)
            values += it.rank + 1
            tensor = torch.sparse_coo_tensor(keys, values, (4000, 16), is_coalesced=True)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            doubled = tensor.to_dense() * 2
        stream.synchronize()
        expected = torch.zeros(4000, 16)
        for of in range(it.world):
            expected[torch.arange(1000) * 3 + of] += 2.0 * (of + 1)
        it.same(doubled, expected, "behind a kernel that takes long")


def check_sparse_kinds(it):
    """All types and reductions, several tensors of a rank, modes of torch; the CPU gives the same."""
    torch, dist = it.torch, it.dist
    world = dist.group.WORLD

    def mine(dtype, device):
        rows = [row for row in range(60) if (row + it.rank) % 3 == 0]
        values = it.input(it.rank, (len(rows), 5), dtype)
        return torch.sparse_coo_tensor([rows], values, (60, 5), is_coalesced=True, check_invariants=False).to(device)

    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    integers = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    ops = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
    kinds = [(dtype, op) for dtype in floats for op in ops]
    kinds += [(dtype, op) for dtype in integers for op in ops if op != "AVG"]
    kinds += [(dtype, op) for dtype in (torch.complex64, torch.complex128) for op in ("SUM", "PRODUCT")]
    kinds += [(torch.bool, op) for op in ("MIN", "MAX")]
    for dtype, op in kinds:
        both = [mine(dtype, "cpu"), mine(dtype, it.device)]
        for tensor in both:
            options = dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, op)
            world.allreduce([tensor], options).wait()
        host, there = both
        assert torch.equal(there._indices().cpu(), host._indices()), (dtype, op)
        bits = [tensor._values().cpu().contiguous().view(torch.uint8) for tensor in both]
        assert torch.equal(*bits), (dtype, op)
    group = world.operations.group if hasattr(world, "operations") else world._get_backend(torch.device(it.device)).operations.group
    several = [mine(torch.float32, it.device) for _ in range(3)]
    dist.group.WORLD.allreduce(several).wait()
    one = mine(torch.float32, it.device)
    dist.all_reduce(one)
    for tensor in several:
        it.same(tensor.to_dense(), one.to_dense().cpu() * 3, "three tensors of a rank")
    with torch.inference_mode():
        tensor = mine(torch.float32, it.device)
        dist.all_reduce(tensor)
    it.same(tensor.to_dense(), one.to_dense().cpu(), "in inference mode")
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        tensor = mine(torch.float32, it.device)
        group_result = group.all_reduce_sparse(tensor)
    finally:
        torch.use_deterministic_algorithms(False)
    it.same(group_result.to_dense(), one.to_dense().cpu(), "of a group")
    # CPU tensors on one rank.
    tensor = mine(torch.float32, "cpu" if it.rank == 0 else it.device)
    if it.world > 1 and it.on_gpu:
        side = dist.new_group()
        it.say(it.refused(lambda: dist.all_reduce(tensor, group=side), "GPU"))


def check_sparse_beside_streams(it):
    """Results never lie in memory that a stream of the program still reads; CSR, started, on another stream."""
    torch, dist = it.torch, it.dist
    streams = [torch.cuda.Stream() for _ in range(64)]  # torch has 32 and deals them in turn
    watched = []
    for stream in streams:
        with torch.cuda.stream(stream):
            block = torch.full((300, 64), 7.0, device=it.device)
            torch.cuda._sleep(LONG // 100)
            watched.append(block.sum())
            del block
    rows = torch.arange(300) if it.rank == 0 else torch.arange(0, 300, 2)
    wide = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), 64), (1000, 64), is_coalesced=True).to(it.device)
    works = [dist.all_reduce(wide, async_op=True)]
    layouts = []
    for stream in streams[:4]:
        with torch.cuda.stream(stream):
            tensor = torch.eye(200, device=it.device).to_sparse_csr()
            work = dist.all_reduce(tensor, async_op=True)
            torch.cuda._sleep(LONG // 10)  # the call does not wait for what comes behind it
            work.wait()
            layouts.append((stream, tensor.to_dense() * 2))
    works[0].wait()
    for stream, doubled in layouts:
        stream.synchronize()
        it.same(doubled, torch.eye(200) * 2 * it.world, "a CSR tensor on a stream")
    assert all(sum.item() == 300 * 64 * 7.0 for sum in watched)
    expected = torch.zeros(1000)
    expected[0:300:2] = it.world
    expected[1:300:2] = 1
    it.same(wide.to_dense()[:, 0], expected, "beside streams")


def check_sparse_short(it):
    """Memory is short on one rank before it comes to the others: all of them hear why."""
    torch, dist = it.torch, it.dist
    from tensorwire.torch import sparse

    kept, last = sparse._coalesced, it.world - 1

    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    twice = torch.sparse_coo_tensor([[0, 0, 5]], torch.ones(3, 4), (10, 4)).to(it.device)
    sparse._coalesced = short if it.rank == last else kept
    try:
        it.say(it.refused(lambda: dist.all_reduce(twice), "7 GiB"))
    finally:
        sparse._coalesced = kept
    dist.all_reduce(twice)
    expected = torch.zeros(10, 4)
    expected[0], expected[5] = 2.0 * it.world, it.world
    it.same(twice.to_dense(), expected, "after that")


def check_sparse_training(it):
    """An embedding with sparse gradients under DDP: the same losses as with Gloo."""
    torch, dist = it.torch, it.dist
    losses = {}
    for name, group in (("gloo", dist.new_group(backend="gloo")), ("tensorwire", None)):
        torch.manual_seed(5)
        model = torch.nn.Embedding(10_000, 16, sparse=True).to(it.device)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses[name] = []
        for step in range(6):
            torch.manual_seed(100 * step + it.rank)
            loss = ddp(torch.randint(10_000, (256,)).to(it.device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    it.say(f"losses {losses['tensorwire'][:3]}; Gloo {losses['gloo'][:3]}")
    pairs = zip(losses["gloo"], losses["tensorwire"], strict=True)
    assert all(abs(one - other) <= 1e-4 * max(abs(one), 1) for one, other in pairs), losses


# Messages.


def around(it):
    """The ranks behind and before this one."""
    return (it.rank + 1) % it.world, (it.rank - 1) % it.world


def check_messages_all_send_first(it):
    """Nobody waits for the receiver, and what was sent may change at once."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    for count in (1, 0, 5, 1000, 300_007, 16 << 20):
        if count > 1000 and not it.on_gpu:
            continue  # On the CPU a large message waits for its receive.
        for dtype in it.types if count < 1 << 20 else it.types[:1]:
            for repeat in range(2):
                tensor = it.mine((count,), dtype, repeat)
                dist.send(tensor, to)
                tensor.zero_()
            for repeat in range(2):
                got = torch.ones(count, dtype=dtype, device=it.device)
                dist.recv(got, source)
                it.same(got, it.input(source, (count,), dtype, repeat), f"{count} of {dtype}, message {repeat}")


def check_messages_batched(it):
    """batch_isend_irecv around a ring, of tensors with gaps too, on other streams, and many at once."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if it.on_gpu else [None]
    for stream in streams:
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for count in (1, 20):
                shape = (300, 200)
                sent = [it.mine(shape, torch.float32, salt) for salt in range(count)]
                got = [torch.full(shape, -1.0, device=it.device) for _ in range(count)]
                if it.on_gpu:
                    torch.cuda._sleep(LONG // 10)
                gaps = [tensor.t().contiguous().t() * 2 for tensor in sent]
                into = [tensor.t().contiguous().t() for tensor in got]
                ops = [dist.P2POp(dist.isend, tensor, to) for tensor in gaps]
                ops += [dist.P2POp(dist.irecv, tensor, source) for tensor in into]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                for salt, tensor in enumerate(into):
                    it.same(tensor + 1, it.input(source, shape, torch.float32, salt) * 2 + 1, f"message {salt} of {count}")


def check_messages_in_flight(it):
    """Many isends before any irecv, tags that overtake each other, tensors that are let go at once."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    count = 100 if it.on_gpu else 20
    works = [dist.isend(it.mine((1000 + salt,), torch.float32, salt), to, tag=salt % 3) for salt in range(count)]
    got = {}
    for tag in (2, 0, 1):
        for salt in range(tag, count, 3):
            got[salt] = torch.full((1000 + salt,), -1.0, device=it.device)
            works.append(dist.irecv(got[salt], source, tag=tag))
    for work in works:
        work.wait()
    for salt, tensor in got.items():
        it.same(tensor, it.input(source, (1000 + salt,), torch.float32, salt), f"message {salt}")
    until(lambda: all(work.is_completed() for work in works))


def check_messages_stream_order(it):
    """What is sent comes late on the stream, and no host waits for it."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    for round in range(5):
        tensor, got = torch.zeros(100_000, device=it.device), torch.zeros(100_000, device=it.device)
        it.finish()
        dist.barrier()
        torch.cuda._sleep(LONG)
        tensor.fill_(it.rank + 1)
        begin = time.perf_counter()
        dist.send(tensor, to)
        dist.recv(got, source)
        took = time.perf_counter() - begin
        copy = got * 2
        it.same(copy, torch.full((100_000,), 2.0 * (source + 1)), f"round {round}")
    it.say(f"a send and a receive behind a busy stream took the host {took * 1e6:.0f} us")
    # An operation of the group in between, and another stream.
    stream = torch.cuda.Stream()
    work = dist.isend(tensor, to)
    got.zero_()
    receive = dist.irecv(got, source)
    total = torch.ones(1000, device=it.device)
    dist.all_reduce(total)
    with torch.cuda.stream(stream):
        receive.wait()
        work.wait()
        it.same(got.clone(), torch.full((100_000,), float(source + 1)), "another stream")
    it.same(total, torch.full((1000,), float(it.world)), "an operation in between")


def check_messages_between_devices(it):
    """CPU to CUDA, CUDA to CPU, and from any rank."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    for count in (1, 0, 1000, 100_003):
        for case in range(8):
            out, into, anybody = (it.device if case & 1 else "cpu"), (it.device if case & 2 else "cpu"), case & 4
            tensor = it.input(it.rank, (count,), torch.float32, case).to(out)
            work = dist.isend(tensor, to)
            got = torch.full((count,), -1.0, device=into)
            came = dist.recv(got) if anybody else dist.recv(got, source)
            work.wait()
            assert came == source, f"from {came}, not {source}"
            it.same(got, it.input(source, (count,), torch.float32, case), f"{count} from {out} to {into}")
            dist.barrier()


def check_messages_from_any_rank(it):
    torch, dist = it.torch, it.dist
    if it.rank:
        for salt in range(10):
            dist.send(it.mine((1000,), torch.int64, salt), 0)
    else:
        counts = [0] * it.world
        for _ in range(10 * (it.world - 1)):
            got = torch.zeros(1000, dtype=torch.int64, device=it.device)
            source = dist.recv(got)
            it.same(got, it.input(source, (1000,), torch.int64, counts[source]), f"from {source}")
            counts[source] += 1
        assert counts[1:] == [10] * (it.world - 1), counts
    dist.barrier()


def check_messages_one_forward_one_backward(it):
    """Stages that pass on what comes, in the order of a 1F1B schedule."""
    torch, dist = it.torch, it.dist
    first, last, batches = it.rank == 0, it.rank == it.world - 1, 8
    works, done, waiting = [], [], []

    def forward(number):
        tensor = torch.full((100_000 if it.on_gpu else 1000,), float(number), device=it.device)
        if not first:
            dist.recv(tensor, it.rank - 1)
        tensor = tensor + 1
        if not last:
            dist.send(tensor, it.rank + 1)
        waiting.append(tensor)

    def backward():
        tensor = waiting.pop(0)
        if not last:
            tensor = torch.zeros_like(tensor)
            dist.irecv(tensor, it.rank + 1).wait()
        tensor = tensor * 2
        if not first:
            works.append(dist.isend(tensor, it.rank - 1))
        done.append(tensor)

    warm = min(it.world - 1 - it.rank, batches)
    for number in range(warm):
        forward(number)
    for number in range(warm, batches):
        forward(number)
        backward()
    while waiting:
        backward()
    for work in works:
        work.wait()
    for number, tensor in enumerate(done):
        expected = float((number + it.world) * 2 ** (it.world - it.rank))
        it.same(tensor, torch.full((tensor.numel(),), expected), f"micro batch {number}")


def check_messages_given_up(it):
    """A receive that times out or is withdrawn loses no message; one that does not fit is refused."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    group = dist.group.WORLD.operations.group
    got = torch.full((1000,), -1.0, device=it.device)
    it.say(it.refused(lambda: group.recv(got, source, timeout=0.1), f"rank {source}"))
    work = group.recv(got, source, async_op=True)
    assert work.withdraw()
    it.finish()
    it.same(got, torch.full((1000,), -1.0), "a receive that was withdrawn")
    dist.barrier()
    for salt in range(2):
        dist.send(it.mine((1000,), torch.float32, salt), to)
    it.refused(lambda: dist.recv(torch.zeros(999, device=it.device), source), f"rank {source}", "1000 float32")
    dist.recv(got, source)
    it.same(got, it.input(source, (1000,), torch.float32, 1), "the message behind it")
    dist.barrier()


def check_messages_give_memory_back(it):
    """Copies of what was sent are used again."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    tensor, got = it.mine((4 << 20,), torch.float32), torch.zeros(4 << 20, device=it.device)
    most = 0
    for round in range(200):
        dist.send(tensor, to)
        dist.recv(got, source)
        if round % 20 == 0:
            it.finish()
            dist.barrier()
            most = max(most, torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0])
    it.same(got, it.input(source, (4 << 20,), torch.float32), "the last message")
    it.say(f"{most >> 20} MiB of the GPU were in use by all processes")


def check_pipeline_schedules(it):
    """torch's own schedules, against the same layers on one device."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch, dist = it.torch, it.dist
    batches, wide = 8, 32

    def layers():
        torch.manual_seed(7)
        return [torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Tanh()) for _ in range(it.world)]

    torch.manual_seed(8)
    batch, target = torch.randn(batches * 4, wide), torch.randn(batches * 4, wide)
    loss = torch.nn.functional.mse_loss
    whole = torch.nn.Sequential(*layers())
    outputs = [loss(whole(part), aim) for part, aim in zip(batch.chunk(batches), target.chunk(batches), strict=True)]
    (sum(outputs) / batches).backward()
    for make in (ScheduleGPipe, Schedule1F1B):
        own = layers()[it.rank].to(it.device)
        stage = PipelineStage(own, it.rank, it.world, torch.device(it.device))
        schedule = make(stage, batches, loss_fn=loss)
        losses = []
        if it.rank == 0 and it.world == 1:
            schedule.step(batch.to(it.device), target=target.to(it.device), losses=losses)
        elif it.rank == 0:
            schedule.step(batch.to(it.device))
        elif it.rank == it.world - 1:
            schedule.step(target=target.to(it.device), losses=losses)
            mean = torch.stack([part.detach().cpu() for part in losses]).mean()
            assert torch.allclose(mean, sum(outputs).detach() / batches, atol=1e-5), f"{mean} in {make.__name__}"
        else:
            schedule.step()
        for mine, expected in zip(own.parameters(), whole[it.rank].parameters(), strict=True):
            assert torch.allclose(mine.grad.cpu(), expected.grad, atol=1e-5), f"a gradient of {make.__name__}"
        dist.barrier()


# Refusals.


def check_refused(it):
    torch, dist = it.torch, it.dist
    tensor = torch.ones(100, device=it.device)
    it.refused(lambda: dist.all_reduce(torch.eye(4, device=it.device).to_sparse_bsr((2, 2))), "sparse_bsr")
    it.say(it.refused(lambda: dist.all_gather([tensor] * it.world, tensor.cpu()), "device"))
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((100,), float(it.world)), "an operation behind refusals")


def check_capture(it):
    torch, dist = it.torch, it.dist
    tensor = torch.ones(100, device=it.device)
    sparse = tensor.to_sparse()
    texts = []
    with contextlib.suppress(Exception):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(1)
            for each in (tensor, sparse):
                texts.append(it.refused(lambda: dist.all_reduce(each), "graph"))
    assert len(texts) == 2, texts
    it.say(texts[0])
    it.finish()
    tensor = torch.ones(100, device=it.device)
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((100,), float(it.world)), "an operation behind a graph")


def check_interrupted(it):
    """Ctrl-C on a rank that waits for the others, in the call and in the wait for a started one; the group works on."""
    torch, dist = it.torch, it.dist
    for started in (False, True):
        tensor = torch.ones(1000, device=it.device)
        if it.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                work = dist.all_reduce(tensor, async_op=started)
                if started:
                    # The wait ends; the operation goes on.
                    work.wait()
                raise AssertionError("not interrupted")
            except KeyboardInterrupt:
                pass
        else:
            time.sleep(0.6)
            if started:
                work = dist.all_reduce(tensor, async_op=True)
            else:
                it.say(it.refused(lambda: dist.all_reduce(tensor), "rank 0", "interrupted"))
        if started:
            work.wait()
            it.same(tensor, torch.full((1000,), float(it.world)), "the started one")
        tensor = torch.ones(1000, device=it.device)
        dist.all_reduce(tensor)
        it.same(tensor, torch.full((1000,), float(it.world)), "behind Ctrl-C")


def check_time_out(it):
    """A rank that does not come in time; the group works on."""
    torch, dist = it.torch, it.dist
    if it.rank == it.world - 1:
        time.sleep(3)
    tensor = torch.ones(1000, device=it.device)
    late = f"rank {it.world - 1}"
    work = it.dist.group.WORLD.operations.group
    it.say(it.refused(lambda: work.all_reduce(tensor, timeout=1.0), late if it.rank != it.world - 1 else "time"))
    tensor = torch.ones(1000, device=it.device)
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((1000,), float(it.world)), "an operation behind a time-out")


def check_nobody_asks(it):
    """The last rank's stream comes too late, and nobody asks how the operation has ended: destroy_process_group raises it."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        # Streams do not wait there: the call itself waits, and raises the error.
        return
    torch, dist = it.torch, it.dist
    group = dist.new_group(timeout=timedelta(seconds=1))
    tensor = torch.ones(1000, device=it.device)
    # What is needed once is there.
    dist.all_reduce(tensor, group=group)
    it.finish()
    dist.barrier()
    is_last = it.rank == it.world - 1
    if is_last:
        # More than a second of the GPU.
        for _ in range(15):
            torch.cuda._sleep(LONG)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    del work
    if is_last:
        # The others have given up by then. This rank may have heard of it, or not yet.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(group)
    else:
        text = it.refused(lambda: dist.destroy_process_group(group), f"queue of rank {it.world - 1}")
        it.say(text)
    it.finish()
    dist.barrier()
    tensor = torch.ones(1000, device=it.device)
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((1000,), float(it.world)), "in the other group")


# What the group does not survive: each has ranks of its own.


def check_mixed(it):
    """CPU and CUDA tensors of different ranks in one call: they go through memory of the host."""
    torch, dist = it.torch, it.dist
    for here in range(it.world):
        device = "cpu" if it.rank == here else it.device
        for shape in [(2,), (300,), (70, 1000), (1 << 20,)]:
            salt = here + shape[0]
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                tensor = it.mine(shape, torch.float32, salt).to(device)
                dist.all_reduce(tensor, op)
                inputs = [it.input(of, shape, torch.float32, salt) for of in range(it.world)]
                together = torch.stack(inputs)
                it.same(tensor, together.sum(0) if op == dist.ReduceOp.SUM else together.amax(0), f"{op} of {shape}")
            tensor = it.mine(shape, torch.float32, salt).to(device)
            work = dist.broadcast(tensor, it.world - 1, async_op=True)
            work.wait()
            it.same(tensor, it.input(it.world - 1, shape, torch.float32, salt), "broadcast")
            gathered = torch.zeros(it.world * math.prod(shape), device=device)
            dist.all_gather_into_tensor(gathered, it.mine(shape, torch.float32, salt).to(device).flatten())
            expected = torch.cat([it.input(of, shape, torch.float32, salt).flatten() for of in range(it.world)])
            it.same(gathered, expected, "all_gather")
            got = torch.zeros(math.prod(shape), device=device)
            every = [it.input(of, (it.world, *shape), torch.float32, salt) for of in range(it.world)]
            dist.reduce_scatter_tensor(got, every[it.rank].to(device).flatten())
            it.same(got, sum(each[it.rank] for each in every).flatten(), "reduce_scatter")
    # All on the GPU again: straight between them.
    tensor = it.mine((5000,), torch.float32)
    dist.all_reduce(tensor)
    it.same(tensor, sum(it.input(of, (5000,), torch.float32) for of in range(it.world)), "all on one device")


def last_killed(it):
    """A rank is killed in a loop. The others hear of it, and their GPU works on."""
    tensor = it.torch.ones(1 << 20, device=it.device)
    killed(it, lambda: it.dist.all_reduce(tensor))


def last_killed_sparse(it):
    """The same in operations of several exchanges, of which some are on the host."""

    def reduce():
        it.dist.all_reduce(it.torch.eye(300, 64, device=it.device).to_sparse(1))

    killed(it, reduce, threading.Timer(1 + os.getpid() % 100 / 100, os.kill, (os.getpid(), signal.SIGKILL)))


def killed(it, reduce, timer=None):
    torch = it.torch
    begin, text = time.monotonic(), None
    if timer and it.rank == it.world - 1:
        timer.start()
    try:
        for round in range(1_000_000):
            if it.rank == it.world - 1 and round == 200 and not timer:
                torch.cuda._sleep(LONG)
                os.kill(os.getpid(), signal.SIGKILL)
            reduce()
            begin = time.monotonic()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    it.say(f"heard after {time.monotonic() - begin:.2f} s: {text}")
    assert f"rank {it.world - 1}" in text, text
    begin = time.monotonic()
    numbers = torch.arange(1000.0, device=it.device) * 2
    assert numbers.sum().item() == 999_000
    it.finish()
    it.say(f"the GPU has worked on after {time.monotonic() - begin:.2f} s")


def last_killed_with_messages(it):
    """The same among messages."""
    torch, dist = it.torch, it.dist
    to, source = around(it)
    tensor, got = torch.ones(1 << 20, device=it.device), torch.zeros(1 << 20, device=it.device)
    begin, text = time.monotonic(), None
    try:
        for round in range(1_000_000):
            if it.rank == it.world - 1 and round == 200:
                torch.cuda._sleep(LONG)
                dist.send(tensor, to)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.send(tensor, to)
            dist.recv(got, source)
            got.add_(1)
            if round % 10 == 0:
                it.finish()
            begin = time.monotonic()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    it.say(f"heard after {time.monotonic() - begin:.2f} s: {text}")
    assert f"rank {it.world - 1}" in text, text
    numbers = torch.arange(1000.0, device=it.device) * 2
    assert numbers.sum().item() == 999_000
    it.finish()


def last_unshareable(it):
    """Memory of a pool of the driver, which cannot be shared. It goes through memory of the host, and messages are copied first."""
    to, source = around(it)
    tensor, got = it.mine((10_000,), it.torch.float32), it.torch.zeros(10_000, device=it.device)
    it.dist.send(tensor, to)
    it.dist.recv(got, source)
    it.same(got, it.input(source, (10_000,), it.torch.float32), "a message")
    for count in (3, 10_000, 1 << 20):
        tensor = it.mine((count,), it.torch.float32)
        it.dist.all_reduce(tensor)
        it.same(tensor, sum(it.input(of, (count,), it.torch.float32) for of in range(it.world)), "an all-reduce")
        work = it.dist.broadcast(tensor, 1, async_op=True)
        work.wait()
    it.say(it.dist.group.WORLD.explain())


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}
LASTS = {name: value for name, value in list(globals().items()) if name.startswith("last_")}
#: What needs a GPU to mean something.
ON_GPU = {
    "check_stream_order",
    "check_sparse_in_stream_order",
    "check_sparse_beside_streams",
    "check_tensors_are_let_go",
    "check_new_memory_at_an_old_address",
    "check_memory_comes_back",
    "check_messages_stream_order",
    "check_messages_give_memory_back",
    "check_refused",
    "check_capture",
    "check_barrier_behind_streams",
    "check_nobody_asks",
    "check_sync_batch_norm",
    "check_profiles",
}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.001)


def run_rank(device, rank, world, port, names):
    """A rank with these checks."""
    faulthandler.enable()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world)}
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    import tensorwire
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.set_device(0)
    dist.init_process_group("tensorwire", timeout=timedelta(seconds=PATIENCE))
    it = Rank(rank, world, device)
    if rank == 0:
        about = f"tensorwire {tensorwire.__version__}, torch {torch.__version__} (CUDA {torch.version.cuda})"
        it.say(f"{about}, backend {dist.get_backend()}")
    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        print(f"begin {name}", flush=True)
        begin = time.monotonic()
        try:
            (CHECKS | LASTS)[name](it)
            it.finish()
        except BaseException:
            with contextlib.suppress(Exception):
                print(f"rank {rank} explains: {dist.group.WORLD.explain()}", flush=True)
            print(f"rank {rank}: {name} FAILED\n{traceback.format_exc()}", flush=True)
            # The others hear that this one is gone.
            os._exit(9)
        print(f"ok {name} {time.monotonic() - begin:.1f}", flush=True)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    if device != "cpu" and names[0] in CHECKS:
        it.say(dist.group.WORLD.explain())
    if names[0] in CHECKS:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def start(device, world, variables, names):
    """Runs ranks with these checks; gives their outputs and exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    orders = [[sys.executable, "-u", __file__, "--rank", device, str(rank), str(world), port, *names] for rank in range(world)]
    environment = os.environ | variables | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(order, env=environment, **pipes) for order in orders]
    end = time.monotonic() + LIMIT * (len(names) + 1)
    outputs = []
    for rank in ranks:
        try:
            outputs.append(rank.communicate(timeout=max(end - time.monotonic(), 1))[0])
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            outputs.append(rank.communicate()[0] + "\nkilled: its time was over")
    return outputs, [rank.returncode for rank in ranks]


def run_checks(device, world, title, variables, names):
    """Runs checks, and those behind one that fails in new ranks; gives how many failed."""
    failed = 0
    while names:
        print(f"{title}, {world} ranks: {len(names)} checks", flush=True)
        outputs, codes = start(device, world, variables, names)
        # One that is to be killed says nothing at its end.
        survivors = world - 1 if names[0].startswith("last_killed") and codes[-1] == -signal.SIGKILL else world
        well = set(names)
        for text in outputs[:survivors]:
            well &= {line.split()[1] for line in text.splitlines() if line.startswith("ok ")}
        for line in outputs[0].splitlines():
            word, _, rest = line.partition(" ")
            if word == "ok" and rest.split()[0] in well:
                print(f"   {rest.split()[0]:40} ok {rest.split()[1]:>6} s", flush=True)
            elif word == "say":
                print(f"      {rest}", flush=True)
        behind = next((at for at, name in enumerate(names) if name not in well), len(names))
        if behind == len(names) and not any(codes[:survivors]):
            break
        failed += 1
        what = "the end" if behind == len(names) else names[behind]
        print(f"   {what:40} FAILED, exit codes {codes}", flush=True)
        for rank, text in enumerate(outputs):
            said = [line for line in text.splitlines() if line.partition(" ")[0] not in ("ok", "begin", "say")]
            print("\n".join([f"   rank {rank} says:", *(f"   | {line}" for line in said[-60:])]), flush=True)
        if "begin " not in outputs[0]:
            print("   the ranks do not come up", flush=True)
            break
        names = names[behind + 1 :]
    return failed


def plan(device, words, settings):
    """Which checks run where: worlds, titles, variables, names."""
    chosen = [name for name in CHECKS if device != "cpu" or name not in ON_GPU]
    chosen = [name for name in chosen if not words or any(word in name for word in words)]
    for title, variables in settings.items():
        for world in (3,) if "--quick" in sys.argv else (2, 3, 4):
            yield world, title, variables, chosen
    for name in LASTS:
        if device == "cpu" or (words and not any(word in name for word in words)):
            continue
        if name.startswith("last_killed") and "--no-kills" in sys.argv:
            continue
        yield (3 if name.startswith("last_killed") else 2), name, POOL if name == "last_unshareable" else SEGMENTS, [name]


def main():
    if "--rank" in sys.argv:
        device, rank, world, port, *names = sys.argv[sys.argv.index("--rank") + 1 :]
        run_rank(device, int(rank), int(world), port, names)
    device = "cpu" if "--cpu" in sys.argv else "cuda:0"
    if device != "cpu" and not has_gpu():
        print("no GPU, or no torch: skipped")
        return 0
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    settings = {"the CPU": {}} if device == "cpu" else {"segments": SEGMENTS, "expandable segments": EXPANDABLE}
    mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')}, MPS: {mps}", flush=True)
    failed = sum(run_checks(device, *part) for part in plan(device, words, settings))
    print("test result: ok" if failed == 0 else f"test result: FAILED, {failed} checks", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
else:
    import pytest

    @pytest.mark.skipif(not has_gpu(), reason="no GPU")
    @pytest.mark.timeout(1800)
    def test_collectives_on_a_gpu():
        assert subprocess.run([sys.executable, __file__], timeout=1700).returncode == 0

    def test_the_program_itself_on_the_cpu():
        pytest.importorskip("torch")
        words = ["all_reduce", "gathers", "futures", "sparse", "messages", "premul", "mesh", "fsdp2", "registry"]
        assert subprocess.run([sys.executable, __file__, "--cpu", *words], timeout=280).returncode == 0
