"""Messages of ranks on different hosts. The hosts are labels, so the messages go over TCP on one machine."""

import pytest
import test_group_messages as messages
from ranks import Ranks, here


def test_messages_between_hosts():
    cases = [
        messages.check_order,
        messages.check_tags,
        messages.check_self,
        messages.check_source,
        messages.check_large,
        messages.check_empty,
        messages.check_wrong,
        messages.check_both_send,
        messages.check_on_its_way,
        messages.check_came_meanwhile,
        messages.check_random_cancels,
        messages.check_line,
        messages.check_dropped,
    ]
    with Ranks(2, each=label) as ranks:
        assert ranks.run(hosts) == [[[0], [1]]] * 2
        for case in cases:
            ranks.run(case)
        text = ranks.run(explain)[0]
        assert "network: another host label (TENSORWIRE_HOST); messages by TCP to " in text, text


def test_from_any_host():
    with Ranks(3, each=label) as ranks:
        ranks.run(messages.check_any)


def test_torch_between_hosts(tmp_path):
    pytest.importorskip("torch")
    with Ranks(2, each=label) as ranks:
        ranks.run(check_torch, str(tmp_path / "store"))


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 0, 1]])
def test_torch_collectives_between_hosts(tmp_path, placement):
    pytest.importorskip("torch")
    with Ranks(len(placement), each=lambda rank: label(placement[rank])) as ranks:
        ranks.run(check_torch_collectives, str(tmp_path / "store"))


def label(rank):
    return {"TENSORWIRE_HOST": f"host{rank}"}


def hosts():
    return here().group.hosts


def explain():
    return here().group.explain()


def check_torch(path):
    import torch
    import torch.distributed as dist

    rank = here().rank
    dist.init_process_group("tensorwire", init_method=f"file://{path}", rank=rank, world_size=2)
    other = 1 - rank
    if rank == 0:
        dist.send(torch.arange(10), 1, tag=3)
        into = torch.empty(5)
        assert dist.recv(into, tag=4) == 1
        assert into.tolist() == [1.5] * 5
    else:
        into = torch.empty(10, dtype=torch.int64)
        dist.recv(into, 0, tag=3)
        assert into.tolist() == list(range(10))
        dist.send(torch.full((5,), 1.5), 0, tag=4)
    # Both send first, large, and with gaps.
    mine, theirs = torch.full((1000, 1000), float(rank)).t(), torch.empty(1000, 1000)
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (theirs == other).all()
    dist.barrier()
    dist.destroy_process_group()


def check_torch_collectives(path):
    import torch
    import torch.distributed as dist

    rank, world = here().rank, here().group.world
    dist.init_process_group("tensorwire", init_method=f"file://{path}", rank=rank, world_size=world)
    everybody = range(world)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 1000, 100_000):
            tensor = torch.full((count,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert (tensor == sum(everybody) + world).all()
            tensor = torch.full((count,), rank, dtype=dtype)
            dist.broadcast(tensor, world - 1)
            assert (tensor == world - 1).all()
            parts = [torch.empty(count, dtype=dtype) for _ in everybody]
            dist.all_gather(parts, torch.full((count,), rank, dtype=dtype))
            assert all((part == index).all() for index, part in enumerate(parts))
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(part, [torch.full((count,), index, dtype=dtype) for index in everybody])
            assert (part == rank * world).all()
            given = torch.tensor(everybody).to(dtype).repeat_interleave(count) + rank
            taken = torch.empty(world * count, dtype=dtype)
            dist.all_to_all_single(taken, given)
            assert (taken == torch.tensor(everybody).to(dtype).repeat_interleave(count) + rank).all()
    mean = torch.full((10,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert (mean == sum(everybody) / world).all()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    model(torch.full((4, 10), float(rank))).sum().backward()
    gradients = model.module.weight.grad.clone()
    dist.broadcast(gradients, 0)
    assert torch.equal(gradients, model.module.weight.grad)
    dist.barrier()
    dist.destroy_process_group()
