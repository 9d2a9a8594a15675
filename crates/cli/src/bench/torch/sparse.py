"""An all-reduce of sparse tensors for `tensorwire bench all-reduce --sparse`; keys.rs says which rank has which keys."""

import math

import torch
import torch.distributed as dist

WIDTH = 64


def signed(word):
    """A number of 64 bits as torch has it."""
    return word - (1 << 64) if word >= 1 << 63 else word


def shifted(words, count):
    """To the right, as if they had no sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def top(share, rows, zipf):
    if not zipf:
        return share
    low, high = 0.0, max(float(rows), 1.0)
    for _ in range(60):
        middle = (low + high) / 2
        if (middle * (1 + math.log(rows / middle)) if middle > 0 else 0.0) < share * rows:
            low = middle
        else:
            high = middle
    return high


def drawn(rank, rows, share, zipf):
    """Which rows a rank has, as one truth for each."""
    keys = torch.arange(rows)
    words = keys * signed(0x9E3779B97F4A7C15)
    words ^= signed((rank + 1) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1)
    words = (words ^ shifted(words, 31)) * signed(0x94D049BB133111EB)
    words ^= shifted(words, 29)
    likely = top(share, rows, zipf)
    limit = (likely / (keys + 1)).clamp(max=1.0) if zipf else torch.full((), likely, dtype=torch.float64)
    return shifted(words, 11).double() < limit.double() * (1 << 53)


def value(rank, iteration):
    return float(rank + 1 + iteration % 7)


class Sparse:
    def __init__(self, keys, size, rank, world, device):
        self.device = device
        millionths, spread = keys.split(":")
        self.rank, self.world = rank, world
        self.rows = size // (WIDTH * 4)
        self.ranks = [drawn(each, self.rows, int(millionths) / 1e6, spread == "zipf") for each in range(world)]
        self.keys = self.ranks[rank].nonzero().t().contiguous().to(device)
        self.union = torch.stack(self.ranks).any(0).nonzero().t()
        self.tensor = None

    def prepare(self, iteration, write=True):
        # What the call before gave has its memory back by then, as in a program.
        self.tensor = None
        values = torch.full((self.keys.shape[1], WIDTH), value(self.rank, iteration), device=self.device)
        shape = (self.rows, WIDTH)
        # As gradients come: torch knows that no key is there twice.
        self.tensor = torch.sparse_coo_tensor(self.keys, values, shape, is_coalesced=True, check_invariants=False)
        self.finish()
        dist.barrier()

    def finish(self):
        """Waits until the GPU has done all that it was given."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def call(self):
        dist.all_reduce(self.tensor)
        self.finish()

    def wrong(self, iteration):
        result = self.tensor.cpu().coalesce()
        if not torch.equal(result.indices(), self.union):
            return result.values().numel()
        sums = sum(has[self.union[0]] * value(rank, iteration) for rank, has in enumerate(self.ranks))
        return int((result.values() != sums[:, None]).sum())
