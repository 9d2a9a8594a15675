"""Every collective of torch.distributed on the backend."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def filled(value, *shape, dtype=torch.float32):
    return torch.full(shape or (5,), value, dtype=torch.float64).to(dtype)


def same(tensor, value):
    assert torch.equal(tensor.to(torch.float64), torch.full_like(tensor, 0, dtype=torch.float64) + value), tensor


@on_ranks
def test_the_backend_has_its_name(rank, size):
    assert dist.get_backend() == "tensorwire"
    group = dist.group.WORLD
    assert (group.rank(), group.size(), group.name()) == (rank, size, "tensorwire")
    assert "rank" in group.explain()


@on_ranks
def test_all_reduce_of_every_type(rank, size):
    for dtype in DTYPES + FLOAT8:
        tensor = filled(rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor, 3)
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.full((3,), complex(rank, 1), dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((3,), 1 + 2j, dtype=dtype))
    tensor = torch.tensor([rank == 0, False])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [True, False]
    assert tensor.view(torch.uint8).tolist() == [1, 0]


@on_ranks
def test_all_reduce_with_every_operation(rank, size):
    ops = {
        dist.ReduceOp.SUM: 7,
        dist.ReduceOp.PRODUCT: 12,
        dist.ReduceOp.MIN: 3,
        dist.ReduceOp.MAX: 4,
        dist.ReduceOp.AVG: 3.5,
    }
    for op, expected in ops.items():
        tensor = filled(3 + rank)
        dist.all_reduce(tensor, op)
        same(tensor, expected)
    for op, expected in {dist.ReduceOp.BAND: 4 & 7, dist.ReduceOp.BOR: 7, dist.ReduceOp.BXOR: 3}.items():
        tensor = filled((7, 4)[rank], dtype=torch.int32)
        dist.all_reduce(tensor, op)
        same(tensor, expected)
    tensor = filled(1 + rank)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    same(tensor, 6)


@on_ranks
def test_an_average_of_integers_is_refused_and_changes_nothing(rank, size):
    tensor = filled(3 + rank, dtype=torch.int64)
    with pytest.raises(ValueError, match="(?i)avg|average"):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    same(tensor, 3 + rank)
    dist.barrier()


@on_ranks
def test_strided_tensors(rank, size):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) * (rank + 1)
    tensor = base.t()[1:5:2]
    expected = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[1:5:2] * 3
    rest = base[:, 0].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    assert torch.equal(base[:, 0], rest)
    out = torch.zeros(3, 4).t()
    dist.broadcast(out if rank else out.fill_(5), 0)
    same(out, 5)
    outs = [torch.zeros(6, 2)[:, 0] for _ in range(size)]
    dist.all_gather(outs, torch.arange(12, dtype=torch.float32)[::2] * (rank + 1))
    assert torch.equal(outs[1], torch.arange(0, 12, 2, dtype=torch.float32) * 2)


@on_ranks
def test_broadcast_and_reduce(rank, size):
    for root in range(size):
        for dtype in [*DTYPES, *FLOAT8, torch.bool, torch.complex64]:
            tensor = filled(root == rank, dtype=dtype)
            dist.broadcast(tensor, root)
            assert tensor.to(torch.complex128).abs().min() == 1
        tensor = filled(rank + 1)
        dist.reduce(tensor, root)
        same(tensor, 3 if rank == root else rank + 1)


@on_ranks
def test_all_gather(rank, size):
    outs = [torch.empty(5) for _ in range(size)]
    dist.all_gather(outs, filled(rank + 1))
    [same(out, r + 1) for r, out in enumerate(outs)]
    # Each rank's part may have its own size.
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(outs, filled(rank + 1, rank + 1))
    [same(out, r + 1) for r, out in enumerate(outs)]
    out = torch.empty(size * 5)
    dist.all_gather_into_tensor(out, filled(rank + 1))
    [same(part, r + 1) for r, part in enumerate(out.chunk(size))]
    out = torch.empty(size, 5)
    dist.all_gather_into_tensor(out, filled(rank + 1))
    [same(part, r + 1) for r, part in enumerate(out)]
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [filled(rank, 2), filled(rank + 7, 3)])
    for r, row in enumerate(lists):
        same(row[0], r), same(row[1], r + 7)
    source = torch.full((3,), 1 + 1j * rank).conj()
    outs = [torch.empty(3, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([outs], [source]).wait()
    assert outs[1][0] == 1 - 1j


@on_ranks
def test_gather_and_scatter(rank, size):
    for root in range(size):
        outs = [torch.empty(5) for _ in range(size)] if rank == root else None
        dist.gather(filled(rank + 1), outs, root)
        [same(out, r + 1) for r, out in enumerate(outs or [])]
        parts = [filled(r + 10) for r in range(size)] if rank == root else None
        out = torch.empty(5)
        dist.scatter(out, parts, root)
        same(out, rank + 10)
    if hasattr(dist, "gather_single"):
        out = torch.empty(size * 5) if rank == 0 else torch.empty(0)
        dist.gather_single(filled(rank + 1), out, 0)
        [same(part, r + 1) for r, part in enumerate(out.chunk(size) if rank == 0 else [])]


@on_ranks
def test_reduce_scatter(rank, size):
    out = torch.empty(5)
    dist.reduce_scatter(out, [filled(r + rank + 1) for r in range(size)])
    same(out, 2 * rank + 3)
    dist.reduce_scatter_tensor(out, torch.cat([filled(r + rank + 1) for r in range(size)]))
    same(out, 2 * rank + 3)
    dist.reduce_scatter_tensor(out, filled(rank + 1, size * 5), dist.ReduceOp.AVG)
    same(out, 1.5)


@on_ranks
def test_all_to_all(rank, size):
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(outs, [filled(10 * rank + r, rank + 1) for r in range(size)])
    [same(out, 10 * r + rank) for r, out in enumerate(outs)]
    out = torch.empty(size * 2, 3)
    dist.all_to_all_single(out, torch.cat([filled(10 * rank + r, 2, 3) for r in range(size)]))
    [same(part, 10 * r + rank) for r, part in enumerate(out.chunk(size))]
    # Rank r sends r + 1 rows to each.
    out = torch.empty(3, 2)
    dist.all_to_all_single(out, filled(rank, 2 * (rank + 1), 2), [1, 2], [rank + 1] * 2)
    same(out[:1], 0), same(out[1:], 1)
    # Splits on one rank and none on the other may describe the same parts.
    out = torch.empty(2)
    splits = ([1, 1], [1, 1]) if rank == 0 else (None, None)
    dist.all_to_all_single(out, filled(rank, 2), *splits)
    assert out.tolist() == [0, 1]
    with pytest.raises(ValueError, match="add up|[sS]plit|equal"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [2, 1])
    with pytest.raises((ValueError, RuntimeError), match="equal|divi"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3))
    dist.barrier()


@on_ranks
def test_coalesced_collectives(rank, size):
    tensors = [filled(rank + 1, 3), filled(rank + 2, 4)]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], 3), same(tensors[1], 5)
    with dist._coalescing_manager() as manager:
        first, second = filled(rank), filled(rank + 5)
        dist.all_reduce(first), dist.all_reduce(second)
    same(first, 1), same(second, 11)
    with dist._coalescing_manager(async_ops=True) as manager:
        outs = [torch.empty(size), torch.empty(size * 2)]
        dist.all_gather_into_tensor(outs[0], filled(rank, 1)), dist.all_gather_into_tensor(outs[1], filled(rank, 2))
    manager.wait()
    assert outs[0].tolist() == [0, 1] and outs[1].tolist() == [0, 0, 1, 1]
    with dist._coalescing_manager():
        outs = [torch.empty(1), torch.empty(2)]
        dist.reduce_scatter_tensor(outs[0], filled(rank, 2)), dist.reduce_scatter_tensor(outs[1], filled(rank, 4))
    same(outs[0], 1), same(outs[1], 1)
    # In the older style, each operation goes to the backend at once.
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        tensor = filled(rank)
        dist.broadcast(tensor, 1, async_op=True)
        other = filled(rank + 3)
        dist.reduce(other, 0, async_op=True)
    manager.wait()
    same(tensor, 1), same(other, 7 if rank == 0 else 4)


@on_ranks
def test_methods_of_the_group_take_tensors_and_lists(rank, size):
    group = dist.group.WORLD
    tensor = filled(rank)
    group.allreduce(tensor).wait(), same(tensor, 1)
    group.allreduce([tensor], dist.ReduceOp.MAX).wait(), same(tensor, 1)
    group.allreduce(tensor, op=dist.ReduceOp.SUM).wait(), same(tensor, 2)
    tensor = filled(rank)
    group.broadcast(tensor, root=1).wait(), same(tensor, 1)
    group.reduce(tensor, root=0, op=dist.ReduceOp.SUM).wait(), same(tensor, 2 if rank == 0 else 1)
    outs = [torch.empty(5) for _ in range(size)]
    group.allgather(outs, filled(rank)).wait(), same(outs[1], 1)
    group.gather(outs if rank == 0 else [], filled(rank + 1), root=0).wait()
    same(outs[1], 2 if rank == 0 else 1)
    out = torch.empty(5)
    group.scatter(out, [filled(3), filled(4)] if rank == 0 else [], root=0).wait(), same(out, 3 + rank)
    group.reduce_scatter(out, [filled(3), filled(4)]).wait(), same(out, 6 + 2 * rank)
    group.barrier().wait()
    # Several tensors of one rank are reduced with those of the others.
    tensors = [filled(rank), filled(10)]
    group.allreduce(tensors).wait()
    same(tensors[0], 21), same(tensors[1], 21)


@on_ranks
def test_messages(rank, size):
    peer = 1 - rank
    for dtype in [*DTYPES, *FLOAT8, torch.bool, torch.complex128]:
        tensor = filled(1, dtype=dtype)
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            got = torch.empty_like(tensor)
            assert dist.recv(got, 0) == 0
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
            dist.send(got, 0)
    out = torch.zeros(3)
    works = [dist.isend(filled(rank, 3), peer, tag=5), dist.irecv(out, peer, tag=5)]
    [work.wait() for work in works]
    same(out, peer)
    assert all(work.is_completed() and work.is_success() for work in works)
    assert works[1].source_rank() == peer
    # Tags keep messages apart.
    if rank == 0:
        dist.isend(filled(1), 1, tag=1), dist.isend(filled(2), 1, tag=2)
        dist.barrier()
    else:
        two, one = torch.empty(5), torch.empty(5)
        dist.recv(two, 0, tag=2), dist.recv(one, 0, tag=1)
        same(one, 1), same(two, 2)
        dist.barrier()
    # From anyone.
    if rank == 0:
        got = torch.empty(5)
        assert dist.recv(got) == 1
        same(got, 9)
        work = dist.irecv(got)
        work.wait()
        assert work.source_rank() == 1
    else:
        dist.send(filled(9), 0), dist.send(filled(8), 0)
    ops = [dist.P2POp(dist.isend, filled(rank), peer), dist.P2POp(dist.irecv, out5 := torch.empty(5), peer)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
    same(out5, peer)


@on_ranks
def test_objects(rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": 0}, {"rank": 1}]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object("x" * (rank + 1), gathered, 0)
    assert rank or gathered == ["x", "xx"]
    objects = [("a", 1)] if rank == 0 else [None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [("a", 1)]
    mine = [None]
    dist.scatter_object_list(mine, ["p", "q"] if rank == 0 else None, 0)
    assert mine == ["pq"[rank]]
    if rank == 0:
        dist.send_object_list([{"n": 1}], 1)
    else:
        got = [None]
        dist.recv_object_list(got, 0)
        assert got == [{"n": 1}]


@on_ranks
def test_empty_tensors_and_scalars(rank, size):
    dist.all_reduce(torch.empty(0))
    dist.broadcast(torch.empty(0, 3), 0)
    out = [torch.empty(0) for _ in range(size)]
    dist.all_gather(out, torch.empty(0))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == 1
    dist.all_to_all_single(torch.empty(0), torch.empty(0))


@on_ranks
def test_what_is_not_supported_is_refused_by_name(rank, size):
    group = dist.group.WORLD
    with pytest.raises(RuntimeError, match="sparse_bsr"):
        dist.all_reduce(torch.eye(4).to_sparse_bsr((2, 2)))
    with pytest.raises(RuntimeError, match="sparse_csr"):
        dist.broadcast(torch.eye(3).to_sparse_csr(), 0)
    if hasattr(torch.ops, "quantized"):
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        with pytest.raises(RuntimeError):
            dist.all_reduce(quantized)
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="meta"):
        backend.allreduce([torch.empty(3, device="meta")], dist.AllreduceOptions())
    conj = torch.ones(3, dtype=torch.complex64).conj()
    with pytest.raises(RuntimeError, match="conj"):
        backend.broadcast([conj], dist.BroadcastOptions())
    # Through torch's dispatcher, which would write to a copy.
    with pytest.raises(RuntimeError, match="conj"):
        dist.broadcast(conj, 0)
    with pytest.raises(RuntimeError, match="conj"):
        dist.all_gather([torch.ones(3, dtype=torch.complex64).conj() for _ in range(size)], torch.ones(3) * 1j)
    dist.barrier()


@on_ranks
def test_monitored_barrier(rank, size):
    from datetime import timedelta

    group = dist.new_group()
    group.monitored_barrier(timedelta(seconds=30))
    group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 200 ms"):
            group.monitored_barrier(timedelta(milliseconds=200))
    dist.barrier()
    if rank == 1:
        with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier, but received errors"):
            group.monitored_barrier(timedelta(seconds=30))
    group.monitored_barrier(timedelta(seconds=30))
    # The group still works.
    tensor = filled(rank)
    dist.all_reduce(tensor, group=group)
    same(tensor, 1)
