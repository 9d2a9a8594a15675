"""All-reduce of sparse tensors."""

import gc
import math
import random
import secrets
import threading
import weakref
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire  # noqa: E402

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG)


def made(rank, sparse=1, dense=1, dtype=torch.float32):
    """Rank r has r + 1 elements, some of them at the same places, one of them twice."""
    count = rank + 2
    shape = [5] * (sparse + dense)
    indices = torch.stack([torch.arange(count).clamp(max=rank) + 1] * sparse)
    values = torch.arange(1, count + 1).reshape([count] + [1] * dense).expand([count] + [5] * dense)
    return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)


def drawn(rank, seed, layout=torch.sparse_coo, dtype=torch.float32, dims=()):
    """Some elements of a tensor of 6 x 7 x dims, different ones on each rank, and on some ranks none."""
    random = torch.Generator().manual_seed(100 * seed + rank)
    there = torch.rand(6, 7, generator=random) < (0 if (rank + seed) % 4 == 0 else 0.3)
    values = torch.randint(1, 4, (6, 7, *dims), generator=random).to(dtype)
    indices = there.nonzero().T.contiguous()
    coo = torch.sparse_coo_tensor(indices, values[there], values.shape, check_invariants=True, is_coalesced=True)
    return converted(coo, layout)


def converted(coo, layout):
    """torch converts not every type, and no dense dimensions."""
    if layout is torch.sparse_coo:
        return coo
    (rows, columns), values = coo.indices(), coo.values()
    if layout is torch.sparse_csr:
        starts = torch.bincount(rows + 1, minlength=7).cumsum(0)
        return torch.sparse_csr_tensor(starts, columns, values, coo.shape, check_invariants=True)
    columns, order = columns.sort(stable=True)
    starts = torch.bincount(columns + 1, minlength=8).cumsum(0)
    return torch.sparse_csc_tensor(starts, rows[order], values[order], coo.shape, check_invariants=True)


def elements(tensor):
    """A dictionary of the elements that are there."""
    if tensor.layout is not torch.sparse_coo:
        by_row = tensor.layout is torch.sparse_csr
        starts = tensor.crow_indices() if by_row else tensor.ccol_indices()
        lines = torch.repeat_interleave(starts.diff()).tolist()
        minor = (tensor.col_indices() if by_row else tensor.row_indices()).tolist()
        places = list(zip(lines, minor, strict=True) if by_row else zip(minor, lines, strict=True))
    else:
        places = list(map(tuple, tensor._indices().T.tolist()))
    assert len(set(places)) == len(places) and (tensor.layout is torch.sparse_csc or places == sorted(places))
    values = tensor.values() if tensor.layout is not torch.sparse_coo else tensor._values()
    return dict(zip(places, values.tolist(), strict=True))


def reduced(op, tensors):
    """What the elements of all ranks become."""
    found = {}
    for tensor in tensors:
        values = tensor.values()
        for place, value in zip(elements(tensor), values, strict=True):
            found.setdefault(place, []).append(value)
    return {place: joined(op, torch.stack(values), len(tensors)).tolist() for place, values in found.items()}


def joined(op, values, size=None):
    """What the rows that ranks have at one place become."""
    join = {
        dist.ReduceOp.SUM: lambda: values.sum(0, dtype=values.dtype) if values.dtype != torch.bool else values.any(0),
        dist.ReduceOp.AVG: lambda: values.sum(0) / size,
        dist.ReduceOp.PRODUCT: lambda: values.prod(0, dtype=values.dtype),
        dist.ReduceOp.MIN: lambda: values.amin(0),
        dist.ReduceOp.MAX: lambda: values.amax(0),
    }
    return join[op]()


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """dist.all_reduce would give the backend a copy of a complex one."""
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    opts.asyncOp = True
    dist.group.WORLD.allreduce([tensor], opts).wait()


@on_ranks
def test_sums_of_any_shape(rank, size):
    for sparse, dense in [(1, 0), (1, 1), (2, 0), (3, 2), (5, 1), (6, 0)]:
        for dtype in (torch.float32, torch.int64, torch.float64, torch.complex64):
            tensor = made(rank, sparse, dense, dtype)
            expected = sum(made(r, sparse, dense, dtype).to_dense() for r in range(size))
            all_reduce(tensor)
            assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), expected)
            assert (tensor.sparse_dim(), tensor.dense_dim(), tensor.dtype) == (sparse, dense, dtype)
    tensor = made(rank)
    expected = sum(made(r).to_dense() for r in range(size)) / size
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor.to_dense(), expected)


@on_ranks
def test_random_shapes(rank, size):
    """0 to 4 sparse dimensions and 0 to 3 dense ones, any density, coalesced or not, against a dictionary."""
    seed = torch.tensor(secrets.randbits(32))
    dist.broadcast(seed, 0)
    dice = random.Random(seed.item())
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for case in range(60):
        sparse = [dice.choice((0, *[dice.randint(1, 5)] * 9)) for _ in range(dice.randint(0, 4))]
        dense = [dice.choice((0, *[dice.randint(1, 4)] * 9)) for _ in range(dice.randint(0, 3))]
        op, dtype = dice.choice(ops), dice.choice((torch.int64, torch.float32, torch.int8))
        counts = [dice.choice((0, 1, dice.randint(0, 40), dice.randint(0, 400))) for _ in range(size)]
        once = [dice.random() < 0.5 for _ in range(size)]
        tensors, found = [], {}
        for of in range(size):
            numbers = torch.Generator().manual_seed(seed.item() + 1000 * case + of)
            count = counts[of] if math.prod(sparse) else 0
            indices = torch.stack([torch.randint(0, n, (count,), generator=numbers) for n in sparse]) if sparse and count else None
            indices = torch.empty(len(sparse), count, dtype=torch.int64) if indices is None else indices
            values = torch.randint(0, 2, (count, *dense), generator=numbers).to(dtype)
            tensor = torch.sparse_coo_tensor(indices, values, [*sparse, *dense], check_invariants=True)
            # torch cannot coalesce one without sparse dimensions.
            tensors.append(tensor.coalesce() if once[of] and sparse else tensor)
            mine = {}
            for place, row in zip(map(tuple, indices.T.tolist()), values, strict=True):
                mine[place] = mine[place] + row if place in mine else row
            for place, row in mine.items():
                found.setdefault(place, []).append(row)
        tensor = tensors[rank]
        dist.all_reduce(tensor, op)
        what = f"seed {seed.item()}, case {case}: {op} of {dtype}, {sparse} {dense}, {counts}"
        assert (tensor.sparse_dim(), tensor.dense_dim()) == (len(sparse), len(dense)) and tensor.is_coalesced(), what
        assert list(tensor.shape) == [*sparse, *dense] and tensor.dtype == dtype, what
        places = sorted(found)
        assert list(map(tuple, tensor._indices().T.tolist())) == places, what
        rows = [joined(op, torch.stack(found[place])) for place in places]
        assert tensor._values().shape == (len(places), *dense), what
        assert not rows or torch.equal(tensor._values(), torch.stack(rows)), what


@on_ranks
def test_every_layout_type_and_reduction(rank, size):
    plain = [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for seed, layout in enumerate(LAYOUTS * 2):
        for dtype in (*plain, *floats, torch.complex64, torch.complex128):
            for op in OPS:
                ordered = not dtype.is_complex or op not in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
                if not ordered or op == dist.ReduceOp.AVG and dtype in plain:
                    continue
                dims = () if seed < 3 else (2,)
                tensor = drawn(rank, seed, layout, dtype, dims)
                expected = reduced(op, [drawn(r, seed, layout, dtype, dims) for r in range(size)])
                all_reduce(tensor, op)
                assert tensor.layout is layout and elements(tensor) == expected, (layout, dtype, op)


@on_ranks
def test_types_that_torch_cannot_add(rank, size):
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.tensor([[3.0, 1.0], [2.0, 4.0]]).to(dtype)
        tensor = torch.sparse_coo_tensor(torch.tensor([[5, rank]]), values, (6, 2))
        dist.all_reduce(tensor)
        assert tensor._indices().tolist() == [[0, 1, 5]], dtype
        assert tensor._values().to(torch.float32).tolist() == [[2, 4], [2, 4], [6, 2]], dtype
    twice = torch.sparse_coo_tensor(torch.tensor([[5, 5]]), values, (6, 2))
    with pytest.raises((ValueError, RuntimeError), match="is there twice"):
        dist.all_reduce(twice)


@on_ranks
def test_conjugated_and_negated_values(rank, size):
    values = torch.tensor([1 + 2j, 3 - 1j])
    for conjugated in (values.conj(), values.conj().imag, torch._neg_view(values.real)):
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), conjugated, (4,), is_coalesced=True)
        expected = conjugated.resolve_conj().resolve_neg() * size
        all_reduce(tensor)
        assert torch.equal(tensor.values(), expected)


@on_ranks
def test_without_elements(rank, size):
    tensor = made(0)
    if rank == 0:
        tensor = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 5), (5, 5))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), made(0).to_dense())
    for layout in LAYOUTS:
        tensor = converted(torch.sparse_coo_tensor(size=(6, 7)).coalesce(), layout)
        dist.all_reduce(tensor)
        assert tensor._nnz() == 0 and tensor.layout is layout and tensor.shape == (6, 7)
    # No element can be there; and no sparse dimension.
    tensor = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 3), (0, 4, 3))
    dist.all_reduce(tensor)
    assert tensor.shape == (0, 4, 3) and tensor._nnz() == 0
    tensor = torch.sparse_coo_tensor(torch.empty(0, 1, dtype=torch.int64), torch.ones(1, 3), (3,))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [size] * 3


@on_ranks
def test_small_indices_stay_small(rank, size):
    starts, columns = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([rank, 2], dtype=torch.int32)
    tensor = torch.sparse_csr_tensor(starts, columns, torch.ones(2), (2, 3))
    dist.all_reduce(tensor)
    assert tensor.crow_indices().dtype == tensor.col_indices().dtype == torch.int32
    assert tensor.to_dense().tolist() == [[1, 1, 0], [0, 0, 2]]


@on_ranks
def test_ranks_may_have_different_layouts(rank, size):
    tensor = drawn(rank, 1, LAYOUTS[rank])
    expected = reduced(dist.ReduceOp.SUM, [drawn(r, 1, LAYOUTS[r]) for r in range(size)])
    dist.all_reduce(tensor)
    assert tensor.layout is LAYOUTS[rank] and elements(tensor) == expected


@on_ranks
def test_in_place(rank, size):
    for layout in LAYOUTS:
        tensor = drawn(rank, 2, layout)
        same, version = tensor, tensor._version
        dist.all_reduce(tensor)
        assert tensor is same and tensor._version > version, "autograd sees that it was changed"
        # What comes back behaves like any other tensor.
        before = tensor.to_dense()
        tensor *= 2
        assert torch.equal(tensor.to_dense(), 2 * before)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), 2 * size * before)
        tensor.zero_()
        assert not tensor.to_dense().any()
    weight = torch.ones(6, 7, requires_grad=True)
    weight.grad = drawn(rank, 2)
    held = weight.grad
    dist.all_reduce(weight.grad)
    assert weight.grad is held
    expected = reduced(dist.ReduceOp.SUM, [drawn(r, 2) for r in range(size)])
    assert elements(held) == expected
    weight.grad += drawn(0, 1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    total = weight.grad.to_dense()
    optimizer.step()
    assert torch.equal(weight.detach(), 1 - total)
    optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.to_dense().any()
    with torch.inference_mode():
        tensors = [drawn(rank, 2, layout) for layout in LAYOUTS]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor, work in zip(tensors, works, strict=True):
        work.wait()
        assert elements(tensor) == expected and tensor.is_inference()


@on_ranks
def test_nothing_is_copied_that_need_not_be(rank, size):
    from tensorwire.torch import sparse

    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 4), (5, 4), is_coalesced=True)
    given = sparse.parts(tensor)
    assert given.keys.data_ptr() == tensor._indices().data_ptr() and given.rows.data_ptr() == tensor._values().data_ptr()
    # The memory of the result is what the tensor has, and goes with it.
    dist.all_reduce(tensor)
    again = sparse.parts(tensor)
    assert again.rows.data_ptr() == tensor._values().data_ptr()
    gone = threading.Event()
    weakref.finalize(tensor._values().untyped_storage(), gone.set)
    del tensor, given, again
    gc.collect()
    assert gone.wait(60)


@on_ranks
def test_among_other_operations(rank, size):
    dist.group.WORLD._enable_collectives_timing()
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
    # Who only asks whether it is over finds the result, too.
    tensor = made(rank)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(tensor.to_dense(), expected) and work.exception() is None


@on_ranks
def test_many_in_flight(rank, size):
    tensors = [drawn(rank, seed % 8, LAYOUTS[seed % 3]) for seed in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for seed, tensor in enumerate(tensors):
        expected = reduced(dist.ReduceOp.SUM, [drawn(r, seed % 8, LAYOUTS[seed % 3]) for r in range(size)])
        assert elements(tensor) == expected


@on_ranks
def test_several_tensors_of_one_rank(rank, size):
    for layout in LAYOUTS:
        for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 1 / size)):
            tensors = [drawn(rank, seed, layout) for seed in (1, 2, 3)]
            expected = sum(drawn(r, seed).to_dense() for r in range(size) for seed in (1, 2, 3)) * factor
            opts = dist.AllreduceOptions()
            opts.reduceOp = op
            dist.group.WORLD.allreduce(tensors, opts).wait()
            assert all(torch.equal(tensor.to_dense(), expected) for tensor in tensors)
            tensors[0] *= 2
            assert torch.equal(tensors[1].to_dense(), expected), "they share no memory"
    opts.reduceOp = dist.ReduceOp.MAX
    with pytest.raises(RuntimeError, match="only sum and avg"):
        dist.group.WORLD.allreduce([made(rank), made(rank)], opts)
    with pytest.raises(ValueError, match="different shapes"):
        dist.group.WORLD.allreduce([made(rank), made(rank, 2)])


@on_ranks
def test_what_cannot_be_reduced(rank, size):
    with pytest.raises(ValueError, match="AVG of int32"):
        dist.all_reduce(made(rank, dtype=torch.int32), dist.ReduceOp.AVG)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2


REFUSED = {
    "bsr": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), "sparse_bsr.*to_sparse"),
    "bsc": (lambda: torch.ones(4, 4).to_sparse_bsc((2, 2)), "sparse_bsc.*to_sparse"),
    "batched csr": (lambda: torch.ones(2, 3, 4).to_sparse_csr(), "sparse_csr with batch dimensions.*to_sparse_coo"),
    "batched csc": (lambda: torch.ones(2, 3, 4).to_sparse_csc(), "sparse_csc with batch dimensions.*to_sparse_coo"),
}


@on_ranks
def test_layouts_that_are_refused(rank, size):
    """On all ranks or on one: nobody waits for a time-out, and the group goes on."""
    for make, text in REFUSED.values():
        tensor = make()
        for asynchronous in (False, True):
            with pytest.raises(tensorwire.UnsupportedError, match=text):
                dist.all_reduce(tensor, async_op=asynchronous)
        assert torch.equal(tensor.to_dense(), make().to_dense()), "it is as it was"
        alone = tensor if rank == 1 else tensor.to_dense().to_sparse_coo()
        with pytest.raises(tensorwire.UnsupportedError if rank == 1 else tensorwire.PeerError, match=text) as caught:
            dist.all_reduce(alone)
        assert rank == 1 or caught.value.rank == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor == size


@on_ranks
def test_mismatches_name_both(rank, size):
    for make, text in (
        (lambda: made(rank, 1, 1 + rank), r"\[5, 5, 5\] with 1 " if rank else r"\[5, 5\] with 1 sparse dimension"),
        (lambda: made(rank, 1 + rank, 2 - rank), f"with {1 + rank} sparse dimension"),
        (lambda: made(rank, dtype=(torch.float32, torch.float64)[rank]), "float32.*float64|float64.*float32"),
        (lambda: made(rank) if rank else torch.ones(5, 5), "all_reduce"),
    ):
        group = dist.new_group(timeout=timedelta(seconds=20))
        with pytest.raises(tensorwire.MismatchError, match=text):
            dist.all_reduce(make(), group=group)


@on_ranks
def test_wrong_indices_are_told_to_all(rank, size):
    for indices, text in (
        ([[3, 1], [0, 0]], "less than the one before"),
        ([[1, 1], [2, 2]], "twice"),
        ([[1, 2], [0, 5]], "-1"),
        ([[-1, 2], [0, 4]], "-1"),
    ):
        right = torch.tensor([[1, 3], [0, 0]])
        wrong = torch.tensor(indices) if rank == 1 else right
        for asynchronous in (False, True):
            tensor = torch.sparse_coo_tensor(wrong, torch.ones(2), (5, 5), check_invariants=False, is_coalesced=True)
            error = ValueError if rank == 1 else tensorwire.PeerError
            with pytest.raises(error) as caught:
                work = dist.all_reduce(tensor, async_op=asynchronous)
                work.wait()
            assert asynchronous or rank == 0 or caught.match(text)
            assert torch.equal(tensor._indices(), wrong), "it is as it was"
    tensor = made(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), sum(made(r).to_dense() for r in range(size)))


def short(*_, **__):
    raise MemoryError("no room for a result")


def dense_and_by_key(layout):
    """A tensor of which so much is there that it is reduced as a dense one, and one of which little is."""
    yield converted(torch.ones(6, 7).to_sparse_coo().coalesce(), layout)
    yield converted(torch.eye(6, 7).to_sparse_coo().coalesce(), layout)


@on_ranks
def test_memory_that_is_short_at_the_end_is_told_to_all(rank, size):
    """What a result is made of needs memory, too. If one rank has none, no rank says that all went well, and no tensor is
    changed."""
    # Indices; the second one of two tensors; room in the one that there is.
    for function, layouts, count in (
        ("unflatten", LAYOUTS, 1),
        ("_alike", LAYOUTS[:1], 2),
        ("_make_room", LAYOUTS[1:], 1),
    ):
        for layout in layouts:
            for tensor in dense_and_by_key(layout):
                tensors = [tensor] + [tensor.clone() for _ in range(1, count)]
                before = elements(tensor)
                for asynchronous in (False, True):
                    opts = dist.AllreduceOptions()
                    opts.asyncOp = asynchronous
                    with pytest.MonkeyPatch.context() as patch:
                        if rank == 1:
                            patch.setattr(f"tensorwire.torch.sparse.{function}", short)
                        with pytest.raises(RuntimeError, match="no room for a result") as caught:
                            work = dist.group.WORLD.allreduce(tensors, opts)
                            work.wait()
                    assert "emory" in str(caught.value)
                    if rank != 1:
                        assert isinstance(caught.value, tensorwire.PeerError) and caught.value.rank == 1, caught.value
                    assert all(elements(each) == before for each in tensors), "it is as it was"
                dist.group.WORLD.allreduce(tensors).wait()
                assert all(elements(each) == {at: count * size * x for at, x in before.items()} for each in tensors)


@on_ranks
def test_a_storage_that_cannot_grow(rank, size):
    """One rank's tensor is in memory of somebody else: all ranks hear that it cannot become the result."""
    import numpy

    starts, values = torch.tensor([0, 1, 1]), torch.from_numpy(numpy.ones(1, "float32"))
    tensor = torch.sparse_csr_tensor(starts, torch.tensor([rank]), values if rank == 1 else values.clone(), (2, 3))
    with pytest.raises((ValueError, RuntimeError), match="not resizable") as caught:
        dist.all_reduce(tensor)
    assert rank == 1 or caught.value.rank == 1
    assert tensor.to_dense().tolist() == [[1 - rank, rank, 0], [0, 0, 0]], "it is as it was"
    # What needs no more room goes well.
    tensor = torch.sparse_csr_tensor(starts, torch.tensor([2]), values if rank == 1 else values.clone(), (2, 3))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [[0, 0, size], [0, 0, 0]]


@on_ranks
def test_a_group_of_ours_takes_them_too(rank, size):
    store = dist.PrefixStore("sparse", dist.distributed_c10d._get_default_store())
    group = tensorwire.Group.from_store(store, rank, size)
    for layout in LAYOUTS:
        tensor = drawn(rank, 1, layout)
        before = elements(tensor)
        found = group.all_reduce_sparse(tensor, "max")
        expected = reduced(dist.ReduceOp.MAX, [drawn(r, 1, layout) for r in range(size)])
        assert found.layout is layout and elements(found) == expected and elements(tensor) == before
        work = group.all_reduce_sparse(tensor.requires_grad_(), async_op=True)
        work.wait()
        assert elements(work.result()) == reduced(dist.ReduceOp.SUM, [drawn(r, 1, layout) for r in range(size)])
    with pytest.raises(tensorwire.UnsupportedError, match="strided"):
        group.all_reduce_sparse(torch.ones(3))
    with pytest.raises(tensorwire.UnsupportedError, match="on meta; move it to the CPU"):
        group.all_reduce_sparse(torch.sparse_coo_tensor(size=(3, 4), device="meta"))


@on_ranks
def test_ddp_with_sparse_gradients(rank, size):
    torch.manual_seed(0)
    for mode in ("sum", "mean"):
        model = torch.nn.EmbeddingBag(10, 3, sparse=True, mode=mode)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            model.weight.grad = None
            ddp(torch.tensor([[rank, 5]])).sum().backward()
            grad = model.weight.grad
            scale = 1 if mode == "sum" else 0.5
            assert grad.is_sparse and grad.is_coalesced() and grad._indices().tolist() == [[0, 1, 5]]
            assert grad._values().tolist() == [[scale / 2] * 3, [scale / 2] * 3, [scale] * 3]
    # Gradients that are kept are added to.
    ddp(torch.tensor([[rank, 5]])).sum().backward()
    assert model.weight.grad.to_dense()[5].tolist() == [1] * 3


def losses(rank, group):
    """Of a small model with two embeddings and a dense layer."""
    torch.manual_seed(7)
    model = Recommender()
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    sparse = torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.05)
    dense = torch.optim.SGD(model.score.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(12):
        users, items = (torch.randint(0, 50, (16, count), generator=random) for count in (1, 4))
        wanted = (users[:, 0] % 2).float()
        loss = torch.nn.functional.mse_loss(ddp(users[:, 0], items), wanted)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        found.append(loss.item())
    return found


class Recommender(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(50, 4, sparse=True)
        self.items = torch.nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
        self.score = torch.nn.Linear(8, 1)

    def forward(self, users, items):
        return self.score(torch.cat([self.users(users), self.items(items)], 1))[:, 0]


@on_ranks
def test_losses_are_those_of_gloo(rank, size):
    """A sum of two has one order: to the last bit."""
    ours = losses(rank, None)
    assert ours[-1] < ours[0]
    assert ours == losses(rank, dist.new_group(backend="gloo"))


@on_ranks
def test_profiles_and_records_hold_no_memory(rank, size):
    with torch.profiler.profile() as profile:
        dist.all_reduce(made(rank))
    assert any("tensorwire:all_reduce" in event.name for event in profile.events())
    tensor, gone = made(rank).coalesce(), threading.Event()
    weakref.finalize(tensor._values().untyped_storage(), gone.set)
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor
    gc.collect()
    assert gone.wait(60), "a callback may hold it a moment longer, but nothing else"


@on_ranks
def test_the_default_device_does_not_matter(rank, size):
    """Results are where the tensors are, whatever device torch would make new ones on."""
    for make in (lambda: made(rank), lambda: made(rank).coalesce(), lambda: made(rank).to_dense().to_sparse_csr()):
        tensor, expected = make(), sum(made(r).to_dense() for r in range(size))
        with torch.device("meta"):
            dist.group.WORLD.allreduce([tensor]).wait()
        assert tensor.is_cpu and torch.equal(tensor.to_dense(), expected)


@on_ranks
def test_columns_of_a_row_in_any_order(rank, size):
    """torch does not check it."""
    tensor = torch.sparse_csr_tensor(
        torch.tensor([0, 3, 3]), torch.tensor([4, 0, 2]), torch.tensor([4.0, 1.0, 2.0]), (2, 5), check_invariants=False
    )
    dist.group.WORLD.allreduce([tensor]).wait()
    assert tensor.col_indices().tolist() == [0, 2, 4] and tensor.values().tolist() == [size, 2 * size, 4 * size]


@on_ranks
def test_an_index_twice_that_torch_cannot_add_up(rank, size):
    """One rank has it: all ranks hear of it, and the group goes on."""
    keys = [3, 3] if rank == 1 else [3, 4]
    tensor = torch.sparse_coo_tensor([keys], torch.ones(2).to(torch.float8_e4m3fn), (9,), check_invariants=False)
    with pytest.raises((ValueError, RuntimeError), match="key 3 at 1 is there twice"):
        dist.all_reduce(tensor)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == size
