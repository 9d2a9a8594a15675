"""Symmetric memory with torch's tensors, on the CPU, in process groups of torch."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire  # noqa: E402
import tensorwire.torch  # noqa: E402
from tensorwire import symmetric  # noqa: E402


def test_which_kind_of_tensor():
    for made in (
        symmetric.empty(4, torch.float64),
        symmetric.empty(4, device=torch.device("cpu")),
        symmetric.empty((2, 2), "float64", torch.device("cpu")),
    ):
        assert isinstance(made, torch.Tensor) and made.numel() == 4 and made.device.type == "cpu"
    assert symmetric.empty(4, device=torch.device("cpu")).dtype == torch.get_default_dtype()
    assert symmetric.empty((0, 3), torch.bfloat16).shape == (0, 3)
    for made in (symmetric.empty(4), symmetric.empty((2, 2), "float64"), symmetric.empty(4, np.int8, "cpu")):
        assert isinstance(made, np.ndarray)
    with pytest.raises(tensorwire.MisuseError, match="nonsense"):
        symmetric.empty(4, "nonsense", torch.device("cpu"))


@on_ranks
def test_reach(rank, size):
    mine = symmetric.empty((size, 1000), torch.bfloat16)
    mine.fill_(-1)
    handle = symmetric.rendezvous(mine)
    assert (handle.rank, handle.world, handle.size) == (rank, size, mine.nbytes)
    handle.barrier()
    for peer in range(size):
        theirs = handle.buffer(peer)
        assert isinstance(theirs, torch.Tensor) and theirs.dtype == torch.bfloat16 and theirs.shape == mine.shape
        theirs[rank] = 10 * rank + peer
    handle.barrier()
    assert mine[:, 0].tolist() == mine[:, -1].tolist() == [10 * peer + rank for peer in range(size)]
    other = (rank + 1) % size
    assert handle.buffer(other, 3, offset=1000 * rank).tolist() == [10 * rank + other] * 3
    assert handle.buffer(other, (5, 2), torch.int64, 7).dtype == torch.int64
    assert handle.buffer(other, 2, "uint8").dtype == torch.uint8
    assert handle.buffer_addresses.tolist() == handle.buffer_ptrs and handle.buffer_addresses.dtype == torch.int64
    assert handle.buffer_ptrs[rank] == mine.data_ptr()
    pad = handle.pad(other)
    assert pad.dtype == torch.uint32 and pad.numel() == symmetric.CHANNELS * size
    handle.barrier()
    handle.close()


@on_ranks
def test_signals(rank, size):
    mine = symmetric.empty(100, torch.float32)
    other = (rank + 1) % size
    with symmetric.rendezvous(mine, dist.group.WORLD) as handle:
        for round in range(100):
            handle.buffer(other).fill_(100 * rank + round)
            handle.put_signal(other, 1)
            handle.wait_signal(other, 1)
            assert mine[-1].item() == 100 * other + round
            handle.barrier()


@on_ranks
def test_process_groups(rank, size):
    """Sub-groups of torch, in another order; memory of tensorwire.torch.empty; a group of ours."""
    turned = dist.new_group([1, 0], use_local_synchronization=True, backend="tensorwire")
    mine = tensorwire.torch.empty(64)
    first, second = symmetric.rendezvous(mine), symmetric.rendezvous(mine, turned)
    assert first.rank == rank and second.rank == dist.get_rank(turned)
    first.barrier()
    second.barrier()
    ours = symmetric.group_of(turned)
    assert isinstance(ours, tensorwire.Group) and symmetric.group_of(ours) is ours
    third = symmetric.rendezvous(mine, ours)
    third.barrier()
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(tensorwire.MisuseError, match="no group of tensorwire"):
        symmetric.rendezvous(mine, gloo)
    dist.destroy_process_group(gloo)
    dist.destroy_process_group(turned)
    with pytest.raises(tensorwire.TensorwireError):
        second.barrier()


@on_ranks
def test_a_mixed_process_group(rank, size):
    mixed = dist.new_group(backend="cpu:tensorwire")
    mine = symmetric.empty(8, torch.int32)
    with symmetric.rendezvous(mine, mixed) as handle:
        handle.barrier()
        assert handle.world == size
    dist.destroy_process_group(mixed)


@on_ranks
def test_operations(rank, size):
    one = symmetric.empty(50_000, torch.bfloat16)
    one.fill_(rank + 1)
    symmetric.all_reduce(one)
    assert one[0].item() == one[-1].item() == 3
    # The operations of torch.distributed take it as well, and the result is in everybody's memory.
    one.fill_(rank + 1)
    dist.all_reduce(one)
    handle = symmetric.rendezvous(one)
    handle.barrier()
    assert handle.buffer(1 - rank)[-1].item() == 3
    handle.barrier()
    parts, part = symmetric.empty((size, 10), torch.int64), symmetric.empty(10, torch.int64)
    part.fill_(rank)
    symmetric.all_gather(parts, part, dist.group.WORLD)
    assert parts[:, 3].tolist() == [0, 1]
    symmetric.reduce_scatter(part, parts, "max")
    assert part.tolist() == [rank] * 10
    got = symmetric.empty((size, 10), torch.int64)
    parts.copy_(torch.tensor([[10 * rank], [10 * rank + 1]]).expand(2, 10))
    symmetric.all_to_all(got, parts)
    assert got[:, 0].tolist() == [rank, 10 + rank]
    symmetric.broadcast(part, 1, timeout=50)
    assert part.tolist() == [1] * 10
    with pytest.raises(tensorwire.MisuseError, match="takes tensors in symmetric memory"):
        symmetric.all_reduce(torch.ones(3))


@on_ranks
def test_refused(rank, size):
    with pytest.raises(tensorwire.MisuseError, match="without gaps"):
        symmetric.rendezvous(symmetric.empty((4, 4), torch.float32).t())
    with pytest.raises(tensorwire.TensorwireError, match="cannot map this memory"):
        symmetric.rendezvous(torch.ones(16) if rank == 1 else symmetric.empty(16, torch.float32))
    with pytest.raises(tensorwire.TensorwireError, match="cannot map this memory"):
        symmetric.rendezvous(torch.ones(0) if rank == 1 else symmetric.empty(16, torch.float32))
    with symmetric.rendezvous(symmetric.empty(16, torch.float32)) as handle:
        with pytest.raises(tensorwire.MisuseError, match="of 64"):
            handle.buffer(1 - rank, 17)
        handle.barrier()


@on_ranks
def test_mappings_live_as_long_as_tensors(rank, size):
    mine = symmetric.empty(1 << 20, torch.float32)
    mine.fill_(rank + 1)
    handle = symmetric.rendezvous(mine)
    handle.barrier()
    view = handle.buffer(1 - rank).view(1024, 1024)[5:6]
    assert view[0, 0].item() == 2 - rank
    handle.barrier()
    handle.close()
    del handle, mine
    gc.collect()
    dist.barrier()
    view.fill_(3)
    assert view.sum().item() == 3 * 1024
    dist.barrier()


@on_ranks
def test_training_in_symmetric_memory(rank, size):
    """Parameters that live there are ordinary parameters."""
    torch.manual_seed(3)
    weights = torch.nn.Parameter(symmetric.empty((8, 8), torch.float32).copy_(torch.randn(8, 8)))
    inputs = torch.randn(16, 8) + rank
    (inputs @ weights).square().mean().backward()
    gradient = symmetric.empty((8, 8), torch.float32).copy_(weights.grad)
    symmetric.all_reduce(gradient, "avg")
    with torch.no_grad():
        weights -= 0.1 * gradient
    handle = symmetric.rendezvous(weights.detach())
    handle.barrier()
    assert torch.equal(handle.buffer(1 - rank), weights)
    handle.barrier()
