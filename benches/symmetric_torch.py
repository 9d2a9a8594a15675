"""All-reduce of symmetric memory beside torch's, in the same processes and in turn, as JSON lines.

    tensorwire run -n 2 --no-prefix -- python benches/symmetric_torch.py

All ranks share the first GPU. Timed is from the call to the end of the stream, on the slowest rank, after a barrier on the host.
torch refuses ranks that share a GPU unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1, which is set here. What either side refuses has a
row with the reason.
"""

import json
import os
import statistics
import sys
import time

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch
import torch.distributed as dist

import tensorwire
from tensorwire import symmetric

SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 128 << 20]
ROUNDS, BEFORE, TURNS = 100, 10, 2
# Without MPS torch's kernels take turns of the GPU, milliseconds each.
SLOW_ROUNDS = 30


def main():
    group = tensorwire.init()
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = free(group)
    served = "can work together" in probe(group)
    after = free(group)
    if group.rank == 0:
        say(
            what="symmetric memory beside torch's",
            ranks=group.world,
            mps=served,
            gpu=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            tensorwire=tensorwire.__version__,
            # Kernels, the pool's first allocation, pads and words; torch's own context is there before.
            device_memory_for_each_rank=(before - after) // group.world,
        )
    theirs = torch_group(group)
    for dtype in torch.bfloat16, torch.float32:
        for size in SIZES:
            ways = ours(group, size, dtype)
            if theirs is not None:
                ways |= torchs(group, theirs, size, dtype)
            measure(group, ways, size, dtype, served)
            del ways
            torch.cuda.synchronize()
            group.barrier()
    if theirs is not None:
        dist.destroy_process_group()


def probe(group):
    tensor = symmetric.empty(4, torch.float32, "cuda")
    handle = symmetric.rendezvous(tensor, group)
    text = handle.explain()
    handle.barrier()
    torch.cuda.synchronize()
    handle.close()
    return text


def free(group):
    """Bytes that are free on the GPU, when all ranks have come so far."""
    group.barrier()
    found = torch.cuda.mem_get_info()[0]
    group.barrier()
    return found


def torch_group(group):
    """The name of torch's group; none if any rank has none."""
    reason = ""
    try:
        dist.init_process_group("gloo")
        import torch.distributed._symmetric_memory  # noqa: F401
    except Exception as error:  # Whatever it is, it is a row.
        reason = f"{type(error).__name__}: {error}"
    return None if refused(group, "torch", "init_process_group", reason) else dist.group.WORLD.group_name


def refused(group, peer, what, reason):
    """Whether any rank has a reason; it is said."""
    if reason:
        say(peer=peer, what=what, rank=group.rank, failed=reason.splitlines()[0][:300])
    some = torch.tensor([bool(reason)], dtype=torch.int32)
    group.all_reduce(some, "max")
    return bool(some[0])


def ours(group, size, dtype):
    count = size // dtype.itemsize
    tensor = symmetric.empty(count, dtype, "cuda")
    tensor.fill_(0)
    output = torch.empty_like(tensor)
    handle = symmetric.rendezvous(tensor, group)
    handle.barrier()
    torch.cuda.synchronize()
    calls = {
        ("tensorwire", "Group.all_reduce"): (tensor, lambda: symmetric.all_reduce(tensor, "sum", group), tensor),
        ("tensorwire", "two-shot"): (tensor, lambda: handle.all_reduce(tensor), tensor),
        ("tensorwire", "one-shot"): (tensor, lambda: handle.one_shot(output, tensor), output),
    }
    return calls | replayed(group, calls)


def torchs(group, name, size, dtype):
    import torch.distributed._symmetric_memory as symmetric_memory

    count, reason = size // dtype.itemsize, ""
    try:
        tensor = symmetric_memory.empty(count, dtype=dtype, device="cuda")
        tensor.fill_(0)
        symmetric_memory.rendezvous(tensor, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if refused(group, "torch", "rendezvous", reason):
        return {}
    output = torch.empty_like(tensor)
    library = torch.ops.symm_mem

    def one_shot():
        library.one_shot_all_reduce_out(tensor, "sum", name, output)

    calls = {
        ("torch", "two-shot"): (tensor, lambda: library.two_shot_all_reduce_(tensor, "sum", name), tensor),
        ("torch", "one-shot"): (tensor, one_shot, output),
    }
    return calls | replayed(group, calls)


def replayed(group, calls):
    """The same as graphs that are replayed, where that goes."""
    found = {}
    for (peer, how), (given, call, result) in calls.items():
        if how == "Group.all_reduce" or given.nbytes != 64 << 10:
            continue
        graph, reason = torch.cuda.CUDAGraph(), ""
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                call()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if not refused(group, peer, f"{how}, captured", reason):
            found[peer, f"{how}, replayed"] = given, graph.replay, result
    return found


def measure(group, ways, size, dtype, served):
    times, wrong = {way: [] for way in ways}, {}
    rounds = ROUNDS if served else SLOW_ROUNDS
    for turn in range(TURNS):
        for way, (given, call, result) in list(ways.items()):
            reason = ""
            try:
                if turn == 0:
                    given.fill_(1)
                    torch.cuda.synchronize()
                    group.barrier()
                    call()
                    torch.cuda.synchronize()
                    wrong[way] = int((result != group.world).sum().item())
                    given.fill_(0)
                    torch.cuda.synchronize()
                    group.barrier()
                mine = []
                for _ in range(BEFORE + rounds):
                    group.barrier()
                    begin = time.perf_counter()
                    call()
                    torch.cuda.current_stream().synchronize()
                    mine.append(1e6 * (time.perf_counter() - begin))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if refused(group, way[0], f"{way[1]} of {size} bytes of {dtype}", reason):
                del ways[way]
                continue
            slowest = torch.tensor(mine[BEFORE:], dtype=torch.float64)
            group.all_reduce(slowest, "max")
            times[way] += slowest.tolist()
    for way in ways:
        if group.rank == 0:
            peer, how = way
            all_times = sorted(times[way])
            say(
                operation="all_reduce",
                peer=peer,
                how=how,
                bytes=size,
                type=str(dtype).removeprefix("torch."),
                ranks=group.world,
                mps=served,
                median_us=round(statistics.median(all_times), 2),
                least_us=round(all_times[0], 2),
                p90_us=round(all_times[len(all_times) * 9 // 10], 2),
                rounds=len(all_times),
                wrong=wrong[way],
            )


def say(**row):
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        say(what="symmetric memory beside torch's", failed="no GPU")
        sys.exit(0)
    main()
