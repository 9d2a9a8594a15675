"""Measures how much memory an all-reduce of sparse tensors needs above its inputs and its result, as JSON lines.

    python benches/sparse_memory.py --ranks 8 --rows 10000000 --share 0.01 [--keys zipf] [--device cuda]

The Python that runs it must find torch and tensorwire. It looks at the memory that the whole machine has left, so nothing
else may run. All ranks together are counted: memory that they share counts once. Of tensors on a GPU, it looks at the memory of
the first GPU, and says what both need on the host, too, and the ratio of all of it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading

WIDTH = 64


def say(**row):
    print(json.dumps(row), flush=True)


def left():
    """Bytes that the machine has left."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def left_on(device):
    """The same of a device."""
    if device == "cpu":
        return left()
    import torch

    return torch.cuda.mem_get_info(0)[0]


def rank(backend, rows, share, spread, device):
    """One rank: it waits for a line before each step, and says what it has done."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    # What is needed once is there before anything is measured.
    dist.all_reduce(torch.sparse_coo_tensor([[0, 1]], torch.ones(2, WIDTH), (rows, WIDTH)).coalesce().to(device))
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.rand(int(rows * share), generator=generator, dtype=torch.float64)
    # Row k is drawn about 1/k times as often as the first.
    keys = (rows**drawn - 1 if spread == "zipf" else rows * drawn).long().unique()
    values = torch.ones(len(keys), WIDTH)
    tensor = torch.sparse_coo_tensor(keys[None], values, (rows, WIDTH), is_coalesced=True, check_invariants=False)
    tensor = tensor.to(device)
    del keys, values
    print(f"has {tensor._nnz()}", flush=True)
    sys.stdin.readline()
    dist.all_reduce(tensor)
    print(f"has {tensor._nnz()}", flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


def measure(backend, world, rows, share, spread, port, device):
    words = [sys.executable, __file__, "--rank-of", backend, "--rows", str(rows), "--share", str(share), "--keys", spread]
    words += ["--device", device]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(words, env={**common, "RANK": str(r)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for r in range(world)
    ]

    def counts():
        return [int(each.stdout.readline().split()[1]) for each in ranks]

    inputs = counts()
    places = ["cpu"] if device == "cpu" else [device, "cpu"]
    before = [left_on(place) for place in places]
    lowest, over = list(before), threading.Event()

    def look():
        while not over.wait(0.001):
            lowest[:] = (min(old, left_on(place)) for old, place in zip(lowest, places, strict=True))

    thread = threading.Thread(target=look)
    thread.start()
    for each in ranks:
        each.stdin.write("\n")
        each.stdin.flush()
    results = counts()
    over.set()
    thread.join()
    for each in ranks:
        each.stdin.close()
    for each in ranks:
        each.wait(60)
    row = 8 + 4 * WIDTH
    above = before[0] - lowest[0] - sum(results) * row
    host = {} if device == "cpu" else {"host_bytes": before[1] - lowest[1]}
    say(
        backend=backend,
        ranks=world,
        rows=rows,
        share=share,
        input_bytes=sum(inputs) * row,
        result_bytes=sum(results) * row,
        above_bytes=above,
        device=device,
        keys=spread,
        **host,
    )
    return above, above + host.get("host_bytes", 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--keys", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank(args.rank_of, args.rows, args.share, args.keys, args.device)
        return
    found = {
        backend: measure(backend, args.ranks, args.rows, args.share, args.keys, args.port + index, args.device)
        for index, backend in enumerate(("tensorwire", "gloo"))
    }
    (ours, ours_in_all), (gloo, gloo_in_all) = found["tensorwire"], found["gloo"]
    say(ours_over_gloo=round(ours / gloo, 3), with_the_host=round(ours_in_all / gloo_in_all, 3))


main()
