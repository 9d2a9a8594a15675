"""Overlap: while the GPU multiplies with one layer's weights, its copy engines gather those of the next one from all ranks.

    tensorwire run -n 2 -- python examples/10_overlap.py

Ranks that share a GPU need MPS for it, as kernels of all ranks wait for each other. Without a GPU there is nothing to show.
"""

import sys
import time

try:
    import torch
except ImportError:
    torch = None
if torch is None or not torch.cuda.is_available():
    print("no GPU, or no torch for it: nothing to show")
    sys.exit(0)

import tensorwire
from tensorwire import symmetric

LAYERS, WIDTH, ROWS, ROUNDS = 4, 4096, 8192, 10

group = tensorwire.init()
device = torch.device("cuda", group.rank % torch.cuda.device_count())
torch.cuda.set_device(device)

# Each rank has a share of the rows of every layer's weights, in memory that the others reach.
share = WIDTH // group.world
shares = symmetric.empty((LAYERS, share, WIDTH), torch.bfloat16, device)
shares.normal_(std=WIDTH**-0.5)
handle = symmetric.rendezvous(shares, group)
if "can work together" not in handle.explain():
    print(handle.explain())
    sys.exit(0)

side = torch.cuda.Stream()
weights = [torch.empty((share * group.world, WIDTH), dtype=torch.bfloat16, device=device) for _ in range(2)]
batch = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=device)


def gather(layer):
    """The weights of a layer, from all ranks, by copy engines on the side stream."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        handle.all_gather(weights[layer % 2], shares[layer], engines=True)


def forward(overlap):
    x = batch
    gather(0)
    for layer in range(LAYERS):
        torch.cuda.current_stream().wait_stream(side)
        if overlap and layer + 1 < LAYERS:
            gather(layer + 1)  # runs beside the product below
        x = x[:, : share * group.world] @ weights[layer % 2]
        if not overlap and layer + 1 < LAYERS:
            gather(layer + 1)
    return x


def timed(overlap):
    group.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        result = forward(overlap)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin) / ROUNDS, result


timed(True), timed(False)
(after, one), (beside, other) = timed(False), timed(True)
assert torch.equal(one, other)
print(f"rank {group.rank} of {group.world}: {after:.2f} ms one after the other, {beside:.2f} ms beside each other")
handle.barrier()
torch.cuda.synchronize()
handle.close()
