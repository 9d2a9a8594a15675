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
