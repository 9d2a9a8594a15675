"""Groups made from groups, meshes, and groups beside other backends."""

import datetime
import threading

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@on_ranks
def test_new_groups(rank, size):
    both, own = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(size)][rank]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=both)
    dist.all_reduce(tensor, group=own)
    assert tensor.tolist() == [2, 2]
    assert dist.get_world_size(own) == 1 and dist.get_rank(own) == 0
    assert dist.get_process_group_ranks(both) == [0, 1]
    dist.destroy_process_group(own)
    dist.destroy_process_group(both)
    dist.barrier()


@on_ranks
def test_two_groups_at_once(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    works = [dist.all_reduce(torch.full((3,), float(i)), group=group, async_op=True) for i, group in enumerate(groups)]
    for i, work in enumerate(works):
        work.wait()
        assert work.result()[0][0] == 2 * i
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2


@on_ranks
def test_split_group(rank, size):
    group = dist.group.WORLD
    timeout = datetime.timedelta(seconds=30)
    part = group.split_group([1, 0], timeout=timeout, group_name="reversed", group_desc="for a test")
    assert (part.rank(), part.size()) == (1 - rank, 2)
    assert (part.group_name, part.group_desc) == ("reversed", "for a test")
    tensor = torch.full((2,), float(rank))
    work = part.broadcast(tensor, root=0)
    work.wait()
    assert work.is_completed() and tensor.tolist() == [1, 1]
    alone = group.split_group([1], group_name="alone")
    assert (alone is None) == (rank == 0)
    if VERSION >= (2, 14):
        made = dist.split_group(split_ranks=[[0], [1]])
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=made)
        assert tensor == 1 and dist.get_world_size(made) == 1
    dist.barrier()


@on_ranks
def test_merge_groups(rank, size):
    own = [dist.new_group([r]) for r in range(size)][rank]
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    merged = own.merge_remote_group(store, size, datetime.timedelta(seconds=30), "together")
    assert merged.size() == size
    tensor = torch.ones(1)
    merged.allreduce(tensor).wait()
    assert tensor == 2
    dist.barrier()


@on_ranks
def test_coalescing_by_hand(rank, size):
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    out = torch.empty(2)
    group.send([torch.full((2,), float(rank))], 1 - rank, 0)
    group.recv([out], 1 - rank, 0)
    work = group._end_coalescing(torch.device("cpu"))
    work.wait()
    assert work.is_completed() and out.tolist() == [1 - rank] * 2
    assert work.get_future().wait() == []


@on_ranks
def test_coalescing_is_of_one_thread_and_one_group(rank, size):
    group, other = dist.group.WORLD, dist.new_group()
    options = dist.AllreduceOptions()
    options.asyncOp = False
    first, second, third, fourth = (torch.ones(2) for _ in range(4))
    group._start_coalescing(torch.device("cpu"))
    assert group.allreduce([first], options) is not None
    assert other.allreduce([second], options) is None
    left = []
    thread = threading.Thread(target=lambda: left.append(group.allreduce([third], options)))
    thread.start()
    thread.join()
    assert left == [None]
    group._end_coalescing(torch.device("cpu")).wait()
    assert group.allreduce([fourth], options) is None
    assert [tensor.tolist() for tensor in (first, second, third, fourth)] == [[2, 2]] * 4
    with pytest.raises(tensorwire.MisuseError, match="without a start"):
        group._end_coalescing(torch.device("cpu"))


@on_ranks
def test_device_mesh(rank, size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    assert mesh["dp"].size() == 2 and mesh["tp"].size() == 1
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group("dp"))
    assert tensor.tolist() == [2, 2, 2]


@on_ranks
def test_beside_another_backend(rank, size):
    """torch then makes the process group, with our backend in it."""
    if VERSION < (2, 14):
        return
    group = dist.new_group(backend="cpu:tensorwire,meta:fake")
    assert type(group) is dist.ProcessGroup
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2, 2, 2]
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert work.get_future().wait()[0].tolist() == [4, 4, 4]


@on_ranks
def test_one_backend_for_each_device(rank, size):
    """As in "cpu:tensorwire,cuda:nccl". Before 2.14 torch would replace the other backend without a word."""
    import torch.testing._internal.distributed.fake_pg  # registers "fake"

    # torch makes them in this order. Where ours is refused behind Gloo's, a rank that is told first takes Gloo's connections away
    # from those that still connect, and these hear of that.
    behind_gloo = "cpu:gloo,cuda:tensorwire" if VERSION >= (2, 14) else "cuda:tensorwire,cpu:gloo"
    for config in ("cpu:tensorwire,cuda:fake", behind_gloo):
        if VERSION < (2, 14):
            with pytest.raises(tensorwire.UnsupportedError, match=f"{config}.*before 2.14.*replace"):
                dist.new_group(backend=config)
            continue
        group = dist.new_group(backend=config)
        # That "fake" is not found is torch's fault, which keeps one backend that it does not bring along.
        names = [group._get_backend(torch.device(device)).name() for device in ("cpu", "cuda")]
        assert names == (["tensorwire"] * 2 if "fake" in config else ["gloo", "tensorwire"])
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.tolist() == [4, 4, 4]
        dist.barrier(group)
        dist.destroy_process_group(group)
    if VERSION >= (2, 14):
        if not hasattr(dist.Backend, "ELSEWHERE"):
            dist.Backend.register_backend("elsewhere", lambda *_: None, devices=["cuda"])
        with pytest.raises(tensorwire.UnsupportedError, match="cpu:tensorwire,cuda:elsewhere.*one backend"):
            dist.new_group(backend="cpu:tensorwire,cuda:elsewhere")
    # The names of one backend twice, and of one device alone, are no others.
    for config in ("cpu:tensorwire,cuda:tensorwire", "cpu:tensorwire"):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=dist.new_group(backend=config))
        assert tensor.tolist() == [2, 2, 2]


@on_ranks
def test_what_the_backend_says_of_itself(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_splitting and backend.supports_coalescing
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=60)
    assert backend.options.backend == "tensorwire"
    assert str(backend.get_error()).endswith("SUCCESS")
    assert (backend.rank(), backend.size(), backend.name()) == (rank, size, "tensorwire")


@on_ranks
def test_functional_collectives(rank, size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    tensor = torch.full((4,), float(rank))
    assert functional.all_reduce(tensor, "sum", group).tolist() == [1] * 4
    assert functional.all_gather_tensor(tensor, 0, group).tolist() == [0] * 4 + [1] * 4
    assert functional.reduce_scatter_tensor(tensor, "sum", 0, group).tolist() == [1] * 2
    assert functional.broadcast(tensor, 1, group).tolist() == [1] * 4
    assert functional.all_to_all_single(tensor, [2, 2], [2, 2], group).tolist() == [0, 0, 1, 1]
    out = functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)
    assert [part[0].item() for part in out] == [1, 3]
    out = functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group)
    assert [part.tolist()[4] for part in out] == [1, 2]
    out = functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group)
    assert [part[0].item() for part in out] == [1, 3]
