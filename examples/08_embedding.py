"""Trains an embedding whose gradients are sparse: of a large table, each step reads and changes a few rows only.

    tensorwire run -n 2 -- python examples/08_embedding.py --rows 2000000       with tensorwire, and a table of 256 MB
    tensorwire run -n 2 -- python examples/08_embedding.py --backend gloo       with Gloo: the same losses

With tensorwire each rank adds up a part of the rows and gives it to all. With Gloo each rank gets the rows of all ranks and
adds them up for itself. With one and two ranks the losses are the same to the last bit. The last line is a row of JSON.
"""

import argparse
import json
import statistics
import sys
import time

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("torch is missing: nothing to show")
    sys.exit(0)
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="tensorwire")
parser.add_argument("--rows", type=int, default=100_000, help="how many things can be bought")
parser.add_argument("--width", type=int, default=32, help="how many numbers stand for one of them")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
PEOPLE, BOUGHT = 256, 20


class Taste(torch.nn.Module):
    """Guesses from what people have bought how they will like something new."""

    def __init__(self):
        super().__init__()
        self.things = torch.nn.EmbeddingBag(options.rows, options.width, sparse=True, mode="mean")
        self.score = torch.nn.Linear(options.width, 1)

    def forward(self, bought):
        return self.score(self.things(bought))[:, 0]


def purchases(rank):
    """What people have bought, and how much of it has an even number, which is to be learned. Every rank has its own people;
    some things are bought by many."""
    random = torch.Generator().manual_seed(1 + rank)
    while True:
        bought = (torch.rand(PEOPLE, BOUGHT, generator=random) ** 6 * options.rows).long()
        yield bought, (bought % 2 == 0).float().mean(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters on every rank
    trained = DistributedDataParallel(Taste())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    losses, times = [], []
    for step, (bought, wanted) in zip(range(options.steps), purchases(rank)):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(trained(bought), wanted)
        loss.backward()  # the gradients are averaged: the table's by its rows
        optimizer.step()
        times.append((time.perf_counter() - begin) * 1e3)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world)
        if rank == 0:
            rows = trained.module.things.weight.grad._nnz()
            print(f"step {step:2}: {times[-1]:6.1f} ms, {rows} of {options.rows} rows, loss {losses[-1]:.5f} {losses[-1].hex()}")
    if rank == 0:
        print(json.dumps(vars(options) | {"ranks": world, "median_ms": statistics.median(times), "loss": losses[-1].hex()}))
    assert losses[-1] < losses[0], f"nothing was learned: {losses}"
    dist.destroy_process_group()


main()
