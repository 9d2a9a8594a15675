"""Collectives on CUDA tensors through torch.distributed. `python tests/python/test_collectives_cuda.py` runs it without pytest.

Ranks are processes that share GPU 0. Each check has a deadline and prints a line. When one fails, the ranks are started
again with the checks behind it. `--cpu` runs what needs no GPU on CPU tensors: to see that the program itself is right.
`--quick` runs them with three ranks alone, and `--no-kills` kills nobody. Words choose checks by parts of their names.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
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


# Refusals.


def check_refused(it):
    torch, dist = it.torch, it.dist
    tensor = torch.ones(100, device=it.device)
    peer = (it.rank + 1) % it.world
    it.say(it.refused(lambda: dist.send(tensor, peer), "send", "cuda"))
    it.refused(lambda: dist.recv(tensor, peer), "recv", "cuda")
    it.say(it.refused(lambda: dist.all_reduce(tensor.to_sparse()), "sparse"))
    it.say(it.refused(lambda: dist.all_gather([tensor] * it.world, tensor.cpu()), "device"))
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((100,), float(it.world)), "an operation behind refusals")


def check_capture(it):
    torch, dist = it.torch, it.dist
    tensor = torch.ones(100, device=it.device)
    text = None
    with contextlib.suppress(Exception):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(1)
            text = it.refused(lambda: dist.all_reduce(tensor), "graph")
    assert text is not None
    it.say(text)
    it.finish()
    tensor = torch.ones(100, device=it.device)
    dist.all_reduce(tensor)
    it.same(tensor, torch.full((100,), float(it.world)), "an operation behind a graph")


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


# What the group does not survive: each has ranks of its own.


def last_mixed(it):
    """CPU and CUDA tensors of different ranks in one call."""
    tensor = it.torch.ones(10_000, device="cpu" if it.rank == 0 else it.device)
    it.say(it.refused(lambda: it.dist.all_reduce(tensor), "rank"))


def last_killed(it):
    """A rank is killed in a loop. The others hear of it, and their GPU works on."""
    torch = it.torch
    tensor = torch.ones(1 << 20, device=it.device)
    begin, text = time.monotonic(), None
    try:
        for round in range(1_000_000):
            if it.rank == it.world - 1 and round == 200:
                torch.cuda._sleep(LONG)
                os.kill(os.getpid(), signal.SIGKILL)
            it.dist.all_reduce(tensor)
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


def last_unshareable(it):
    """Memory of a pool of the driver, which cannot be shared."""
    tensor = it.torch.ones(10_000, device=it.device)
    it.say(it.refused(lambda: it.dist.all_reduce(tensor), "pool" if it.rank == 0 else ""))


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}
LASTS = {name: value for name, value in list(globals().items()) if name.startswith("last_")}
#: What needs a GPU to mean something.
ON_GPU = {
    "check_stream_order",
    "check_tensors_are_let_go",
    "check_new_memory_at_an_old_address",
    "check_memory_comes_back",
    "check_refused",
    "check_capture",
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
        survivors = world - 1 if names == ["last_killed"] and codes[-1] == -signal.SIGKILL else world
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
        if name == "last_killed" and "--no-kills" in sys.argv:
            continue
        yield (3 if name == "last_killed" else 2), name, POOL if name == "last_unshareable" else SEGMENTS, [name]


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
        words = ["all_reduce", "gathers", "futures"]
        assert subprocess.run([sys.executable, __file__, "--cpu", *words], timeout=280).returncode == 0
