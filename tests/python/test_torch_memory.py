"""Tensors in shared memory."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire.torch  # noqa: E402

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize]


def test_every_type_and_shape():
    for dtype in {*DTYPES}:
        if "bits" in str(dtype) or "int" in str(dtype) and any(str(dtype).endswith(f"int{n}") for n in range(1, 8)):
            continue
        if str(dtype).startswith("torch.q"):
            continue
        tensor = tensorwire.torch.empty(3, 2, dtype=dtype)
        assert tensor.shape == (3, 2) and tensor.dtype == dtype
    assert tensorwire.torch.empty(2, 0).shape == (2, 0)
    assert tensorwire.torch.empty(()).shape == ()
    assert tensorwire.torch.empty((4,)).dtype == torch.get_default_dtype()
    assert tensorwire.torch.empty(torch.Size([2])).shape == (2,)
    assert tensorwire.torch.empty(3, requires_grad=True).requires_grad
    assert tensorwire.torch.zeros(3).tolist() == [0, 0, 0]
    assert tensorwire.torch.full((2,), 7).tolist() == [7, 7]


def test_like_another():
    tensor = tensorwire.torch.empty_like(torch.ones(3, 4, dtype=torch.bfloat16).t())
    assert tensor.shape == (4, 3) and tensor.dtype == torch.bfloat16 and tensor.stride() == (1, 4)
    assert tensorwire.torch.empty_like(torch.ones(2, 3)[:, :1]).is_contiguous()
    assert tensorwire.torch.empty_like(torch.ones(2, 0)).shape == (2, 0)


def test_the_memory_lives_as_long_as_a_view():
    view = tensorwire.torch.full((1000,), 3.0)[10:20]
    assert view.sum() == 30


@on_ranks
def test_collectives_on_it(rank, size):
    tensor = tensorwire.torch.empty(100_000).fill_(rank + 1)
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    dist.all_reduce(tensor[5:50])
    assert tensor[5:50].eq(6).all() and tensor[50:].eq(3).all()
    out = tensorwire.torch.empty(200_000)
    dist.all_gather_into_tensor(out, tensor)
    assert out[100_000:].equal(tensor)
    # Half of the ranks have it in shared memory.
    mixed = tensorwire.torch.empty(1000) if rank else torch.empty(1000)
    dist.all_reduce(mixed.fill_(rank))
    assert mixed.eq(1).all()
    dist.barrier()
