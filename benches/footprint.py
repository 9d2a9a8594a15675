"""What a group costs before it does anything, in time and memory. benches/through_torch.py runs it on every rank."""

import gc
import json
import os
import statistics
import time
from datetime import timedelta

import tensorwire

TIMES, IDLE = 7, 5
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = tensorwire.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)


def resident():
    """MiB of this process that are in memory."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Rss:")) / 1024


def slowest(name, value):
    """The largest of what the ranks bring."""
    store.set(f"{name}/{rank}", repr(value))
    return max(float(word) for word in store.multi_get([f"{name}/{other}" for other in range(world)]))


def say(**row):
    if rank == 0:
        print(json.dumps(row), flush=True)


def init_native():
    times = []
    for number in range(TIMES):
        store.barrier(f"native/{number}", world)
        start = time.perf_counter()
        group = tensorwire.Group.from_store(store, rank, world, name=f"native-{number}")
        times.append(slowest(f"native/{number}", time.perf_counter() - start))
        group.barrier()
        group.close()
    say(op="init", through="native", ranks=world, median_ms=statistics.median(times) * 1e3, max_ms=max(times) * 1e3)


def idle_memory():
    # What stays is what groups cost, not what the first use of a library costs.
    groups, before = [], resident()
    for number in range(IDLE):
        groups.append(tensorwire.Group.from_store(store, rank, world, name=f"idle-{number}"))
        groups[-1].barrier()
        if number == 0:
            first = resident()
    after = slowest("after", resident() - first) / (IDLE - 1)
    say(op="memory", which="the first", ranks=world, mib=slowest("first", first - before))
    say(op="memory", which="each further", ranks=world, mib=after)
    for group in groups:
        group.close()


def init_torch():
    try:
        import torch.distributed as dist
    except ImportError:
        return
    theirs = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
    times = []
    for number in range(TIMES):
        prefixed = dist.PrefixStore(f"torch-{number}", theirs)
        store.barrier(f"torch/{number}", world)
        start = time.perf_counter()
        dist.init_process_group("tensorwire", store=prefixed, rank=rank, world_size=world)
        times.append(slowest(f"torch/{number}", time.perf_counter() - start))
        dist.barrier()
        dist.destroy_process_group()
    # The first one also loads what torch needs for it.
    say(op="init", through="torch", ranks=world, median_ms=statistics.median(times) * 1e3, max_ms=max(times) * 1e3)


idle_memory()
init_native()
init_torch()
store.barrier("done", world)
