"""All-reduce of sparse tensors."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire  # noqa: E402


def made(rank, sparse=1, dense=1, dtype=torch.float32):
    """Rank r has r + 1 elements, some of them at the same places, one of them twice."""
    count = rank + 2
    shape = [5] * (sparse + dense)
    indices = torch.stack([torch.arange(count).clamp(max=rank) + 1] * sparse)
    values = torch.arange(1, count + 1).reshape([count] + [1] * dense).expand([count] + [5] * dense)
    return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)


@on_ranks
def test_sums_of_any_shape(rank, size):
    for sparse, dense in [(1, 0), (1, 1), (2, 0), (3, 2), (5, 1), (6, 0)]:
        for dtype in (torch.float32, torch.int64, torch.float64, torch.complex64):
            tensor = made(rank, sparse, dense, dtype)
            expected = sum(made(r, sparse, dense, dtype).to_dense() for r in range(size))
            # dist.all_reduce would give the backend a copy of a complex one.
            dist.group.WORLD.allreduce([tensor]).wait()
            assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), expected)
    tensor = made(rank)
    expected = sum(made(r).to_dense() for r in range(size)) / size
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor.to_dense(), expected)


@on_ranks
def test_without_elements(rank, size):
    tensor = made(0)
    if rank == 0:
        tensor = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 5), (5, 5))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), made(0).to_dense())


@on_ranks
def test_among_other_operations(rank, size):
    tensors = [made(rank) for _ in range(3)]
    works = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(dist.all_reduce(torch.ones(3), async_op=True))
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success() and work._get_duration() >= 0
    expected = sum(made(r).to_dense() for r in range(size))
    assert all(torch.equal(tensor.to_dense(), expected) for tensor in tensors)
    (value,) = dist.all_reduce(made(rank), async_op=True).get_future().wait()
    assert torch.equal(value.to_dense(), expected)


@on_ranks
def test_what_cannot_be_summed(rank, size):
    with pytest.raises(RuntimeError, match="only sum and avg"):
        dist.all_reduce(made(rank), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="average"):
        dist.all_reduce(made(rank, dtype=torch.int32), dist.ReduceOp.AVG)
    with pytest.raises(tensorwire.MismatchError, match=r"\[5, 5\].*\[5, 5, 5\]|\[5, 5, 5\].*\[5, 5\]"):
        dist.all_reduce(made(rank, 1, 1 + rank))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2


@on_ranks
def test_ddp_with_sparse_gradients(rank, size):
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(10, 3, sparse=True, mode="sum")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.tensor([[rank, 5]])).sum().backward()
    grad = model.weight.grad.to_dense()
    assert grad[5].tolist() == [1, 1, 1] and grad[0].tolist() == [0.5] * 3 and grad[1].tolist() == [0.5] * 3
