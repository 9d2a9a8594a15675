"""Moves DDP's gradient buckets to shared memory, in a communication hook, and shows what that gains.

    tensorwire run -n 4 -- python examples/06_ddp_shared.py 25      a model of 25 million parameters

Each bucket is moved to shared memory once, when it is first seen, and the gradients are views of it. From then on ranks
read each other's gradients there, where they would otherwise exchange copies.
"""

import sys
import time

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("torch is missing: nothing to show")
    sys.exit(0)
from torch.nn.parallel import DistributedDataParallel

from tensorwire.torch import SharedGradients, shared_memory_hook

WIDTH, STEPS = 512, 9


def model(millions):
    torch.manual_seed(0)
    layers = max(2, round(millions * 1e6 / WIDTH / WIDTH))
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def steps(replica, points):
    """The median time of a step, and the gradients after the last one."""
    times = []
    for _ in range(STEPS):
        replica.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        replica(points).square().mean().backward()
        times.append(time.perf_counter() - start)
    return sorted(times)[STEPS // 2], [parameter.grad.clone() for parameter in replica.parameters()]


def main(millions):
    torch.set_num_threads(1)
    dist.init_process_group("tensorwire")
    rank = dist.get_rank()
    points = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(1 + rank))

    private, gradients = steps(DistributedDataParallel(model(millions), gradient_as_bucket_view=True), points)

    replica = DistributedDataParallel(model(millions), gradient_as_bucket_view=True)
    replica.register_comm_hook(SharedGradients(), shared_memory_hook)
    shared, same = steps(replica, points)

    # DDP divides before it adds, the hook after: the last bits differ unless the number of ranks is a power of two.
    torch.testing.assert_close(same, gradients, rtol=1e-4, atol=1e-7)
    if rank == 0:
        print(f"a step takes {private * 1e3:.1f} ms, with gradients in shared memory {shared * 1e3:.1f} ms")
    dist.destroy_process_group()


main(float(sys.argv[1]) if len(sys.argv) > 1 else 2)
