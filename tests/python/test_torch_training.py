"""What is built on torch.distributed, on the backend: DDP, FSDP2, DTensor, ZeroRedundancyOptimizer, checkpoints."""

import contextlib
import logging
import tempfile

import pytest
from said import Said

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire.torch  # noqa: E402


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))


def batch(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def loss(net, rank):
    inputs, wanted = batch(rank)
    return torch.nn.functional.mse_loss(net(inputs), wanted)


def expected_gradients(size):
    """What one process computes on the batches of all."""
    net = model()
    for rank in range(size):
        (loss(net, rank) / size).backward()
    return [parameter.grad for parameter in net.parameters()]


def check_gradients(net, size):
    for parameter, expected in zip(net.parameters(), expected_gradients(size), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@on_ranks
def test_ddp_averages_gradients(rank, size):
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        net = model(seed=rank)
        net.load_state_dict(model().state_dict())
        ddp = DDP(net, **options)
        for _ in range(3):
            ddp.zero_grad()
            loss(ddp, rank).backward()
            check_gradients(net, size)


@on_ranks
def test_ddp_keeps_gradients_in_shared_memory(rank, size):
    """Buckets are moved once, and once more after DDP has arranged them anew in its second step."""
    net, state = model(), tensorwire.torch.SharedGradients()
    ddp = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(state, tensorwire.torch.shared_memory_hook)
    addresses = []
    for step in range(5):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        loss(ddp, rank).backward()
        check_gradients(net, size)
        places = {place.untyped_storage().data_ptr() for place in state._places.values()}
        assert {parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()} <= places
        addresses.append(places)
    assert addresses[2] == addresses[3] == addresses[4]


@on_ranks
def test_ddp_whose_gradients_are_no_views_copies_none_to_shared_memory(rank, size):
    net, state, said = model(), tensorwire.torch.SharedGradients(), Said()
    ddp = DDP(net, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(state, tensorwire.torch.shared_memory_hook)
    logging.getLogger("tensorwire").addHandler(said)
    for _ in range(3):
        ddp.zero_grad()
        loss(ddp, rank).backward()
        check_gradients(net, size)
    assert not state._places
    (line,) = said.lines
    assert "not averaged in shared memory" in line and "gradient_as_bucket_view=True" in line, line


@on_ranks
def test_ddp_says_that_a_parameter_without_gradient_keeps_its_bucket(rank, size):
    net, state, said = Branches(), tensorwire.torch.SharedGradients(), Said()
    ddp = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp.register_comm_hook(state, tensorwire.torch.shared_memory_hook)
    logging.getLogger("tensorwire").addHandler(said)
    ddp(rank).backward()
    assert all(part.weight.grad.eq(0.5).all() for part in net.parts)
    (line,) = said.lines
    assert "a parameter has no gradient in this step" in line, line


@on_ranks
def test_what_is_slower_is_an_error_in_strict_mode(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorwire._native.is_strict", lambda: True)
        ddp = DDP(model())
        ddp.register_comm_hook(tensorwire.torch.SharedGradients(), tensorwire.torch.shared_memory_hook)
        with pytest.raises(Exception, match="not averaged in shared memory.*TENSORWIRE_STRICT"):
            loss(ddp, rank).backward()


@on_ranks
def test_ddp_makes_parameters_and_buffers_equal(rank, size):
    net = torch.nn.Sequential(model(seed=rank), torch.nn.BatchNorm1d(3))
    ddp = DDP(net)
    loss(ddp, rank).backward()
    loss(ddp, rank).backward()
    total = [tensor.clone().double() for tensor in net.state_dict().values()]
    for tensor in total[:6]:
        other = tensor.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, tensor)


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])

    def forward(self, which):
        return self.parts[which](torch.ones(1, 2)).sum()


@on_ranks
def test_ddp_with_unused_parameters(rank, size):
    net = Branches()
    ddp = DDP(net, find_unused_parameters=True)
    ddp(rank).backward()
    assert all(part.weight.grad.eq(0.5).all() for part in net.parts)


@on_ranks
def test_ddp_without_synchronisation(rank, size):
    net = model()
    ddp = DDP(net)
    with ddp.no_sync():
        loss(ddp, rank).backward()
    local = [parameter.grad.clone() for parameter in net.parameters()]
    loss(ddp, rank).backward()
    for parameter, first, average in zip(net.parameters(), local, expected_gradients(size), strict=True):
        mean = first.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        torch.testing.assert_close(parameter.grad, mean + average)


@on_ranks
def test_ddp_with_uneven_inputs(rank, size):
    from torch.distributed.algorithms.join import Join

    net = model()
    ddp = DDP(net)
    with Join([ddp]):
        for _ in range(2 + 3 * rank):
            loss(ddp, rank).backward()
    dist.barrier()


@on_ranks
def test_ddp_with_communication_hooks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    group = dist.group.WORLD
    hooks = [
        (group, default_hooks.allreduce_hook),
        (None, tensorwire.torch.shared_memory_hook),
        (group, tensorwire.torch.shared_memory_hook),
        (tensorwire.torch.SharedGradients(), tensorwire.torch.shared_memory_hook),
    ]
    for state, hook in hooks:
        for view in (False, True):
            net = model()
            ddp = DDP(net, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
            ddp.register_comm_hook(state, hook)
            for _ in range(3):
                ddp.zero_grad()
                loss(ddp, rank).backward()
                check_gradients(net, size)
    net = model()
    ddp = DDP(net)
    ddp.register_comm_hook(group, default_hooks.bf16_compress_hook)
    loss(ddp, rank).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    # Its callbacks wait for other collectives.
    net = model()
    ddp = DDP(net)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(5):
        loss(ddp, rank).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in net.parameters())


@on_ranks
def test_an_error_comes_out_of_backward(rank, size):
    group = dist.new_group()
    net = model()
    ddp = DDP(net, process_group=group)
    dist.barrier()
    group.abort()
    with pytest.raises(RuntimeError, match="abort"):
        loss(ddp, rank).backward()
    dist.barrier()


@on_ranks
def test_fsdp2(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss(net, rank).backward()
    for parameter, expected in zip(net.parameters(), expected_gradients(size), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)
    optimizer.step()


@on_ranks
def test_dtensor(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    whole, other = torch.randn(6, 4), torch.randn(4, 6)
    left, right = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(other, mesh, [Replicate()])
    torch.testing.assert_close((left @ right).full_tensor(), whole @ other)
    left = distribute_tensor(whole, mesh, [Shard(1)])
    right = distribute_tensor(other, mesh, [Shard(0)])
    torch.testing.assert_close((left @ right).full_tensor(), whole @ other)
    assert torch.equal(left.redistribute(placements=[Shard(0)]).full_tensor(), whole)


@on_ranks
def test_zero_redundancy_optimizer(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = model()
    ddp = DDP(net)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    reference = model()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad(), plain.zero_grad()
        loss(ddp, rank).backward()
        for r in range(size):
            (loss(reference, r) / size).backward()
        optimizer.step(), plain.step()
    for mine, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    optimizer.consolidate_state_dict(0)


@on_ranks
def test_checkpoint(rank, size):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    values = torch.randn(8, 3)
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) if rank == 0 else None]
        dist.broadcast_object_list(folders, 0)
        checkpoint.save({"tensor": distribute_tensor(values, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folders[0])
        state = {"tensor": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(1)]), "step": 0}
        checkpoint.load(state, checkpoint_id=folders[0])
        assert state["step"] == 7 and torch.equal(state["tensor"].full_tensor(), values)
        dist.barrier()
