"""Trains a small model with DistributedDataParallel. Only the name of the backend says who carries the gradients.

    tensorwire run -n 2 -- python examples/05_ddp.py            with tensorwire
    tensorwire run -n 2 -- python examples/05_ddp.py gloo       with Gloo: the same losses

With one and two ranks the losses are the same to the last bit. From three on, the order in which a backend adds the
gradients shows in their last bits: tensorwire adds in the order of ranks, Gloo as they come round its ring.
"""

import sys

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("torch is missing: nothing to show")
    sys.exit(0)
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 30, 32


def model():
    torch.manual_seed(0)  # the same parameters on every rank
    first, second, last = torch.nn.Linear(2, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    return torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), last)


def batches(rank):
    """Points of a plane and what is to be learned about them; every rank has its own."""
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        points = torch.rand(BATCH, 2, generator=generator) * 2 - 1
        yield points, (points[:, :1] * 3).sin() * points[:, 1:]


def main(backend):
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    # Small buckets, so that even this model has several of them in flight.
    trained = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    first = None
    for step, (points, wanted) in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(trained(points), wanted)
        loss.backward()  # gradients are averaged while it runs
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean = mean.item() / world
        first = mean if first is None else first
        if rank == 0:
            print(f"step {step:2} loss {mean:.5f} {mean.hex()}")
    assert mean < first, f"nothing was learned: {first} before, {mean} after"
    dist.destroy_process_group()


main(sys.argv[1] if len(sys.argv) > 1 else "tensorwire")
