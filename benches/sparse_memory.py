"""Measures how much memory an all-reduce of sparse tensors needs above its inputs and its result, as JSON lines.

    python benches/sparse_memory.py --ranks 8 --rows 10000000 --share 0.01

The Python that runs it must find torch and tensorwire. It looks at the memory that the whole machine has left, so nothing
else may run. All ranks together are counted: memory that they share counts once.
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


def rank(backend, rows, share):
    """One rank: it waits for a line before each step, and says what it has done."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    # What is needed once is there before anything is measured.
    dist.all_reduce(torch.sparse_coo_tensor([[0, 1]], torch.ones(2, WIDTH), (rows, WIDTH)).coalesce())
    generator = torch.Generator().manual_seed(dist.get_rank())
    keys = torch.randint(rows, (int(rows * share),), generator=generator).unique()
    values = torch.ones(len(keys), WIDTH)
    tensor = torch.sparse_coo_tensor(keys[None], values, (rows, WIDTH), is_coalesced=True, check_invariants=False)
    del keys, values
    print(f"has {tensor._nnz()}", flush=True)
    sys.stdin.readline()
    dist.all_reduce(tensor)
    print(f"has {tensor._nnz()}", flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


def measure(backend, world, rows, share, port):
    words = [sys.executable, __file__, "--rank-of", backend, "--rows", str(rows), "--share", str(share)]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(words, env={**common, "RANK": str(r)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for r in range(world)
    ]

    def counts():
        return [int(each.stdout.readline().split()[1]) for each in ranks]

    inputs = counts()
    before, lowest, over = left(), [left()], threading.Event()

    def look():
        while not over.wait(0.001):
            lowest[0] = min(lowest[0], left())

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
    above = before - lowest[0] - sum(results) * row
    say(
        backend=backend,
        ranks=world,
        rows=rows,
        share=share,
        input_bytes=sum(inputs) * row,
        result_bytes=sum(results) * row,
        above_bytes=above,
    )
    return above


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank(args.rank_of, args.rows, args.share)
        return
    found = {
        backend: measure(backend, args.ranks, args.rows, args.share, args.port + index)
        for index, backend in enumerate(("tensorwire", "gloo"))
    }
    say(ours_over_gloo=round(found["tensorwire"] / found["gloo"], 3))


main()
