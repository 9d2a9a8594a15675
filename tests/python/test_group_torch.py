"""Groups with tensors of torch: the types that NumPy does not have, layouts, and tensors that are none."""

import time
import weakref

import numpy
import pytest
import torch
from ranks import here

import tensorwire

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
#: Types that may be reduced or only moved, as the library has it; never wrong.
ODD = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32", "bits8", "bits16"]


def named(name):
    return getattr(torch, name)


@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS, *INTEGERS, *COMPLEX, *NARROW], ids=str)
def test_types(pools, dtype):
    pools(2).run(check_type, str(dtype).removeprefix("torch."))


def check_type(name):
    group, rank, dtype = here().group, here().rank, named(name)
    values = torch.tensor([0, 1, 2, 3, 4]).to(dtype)
    x = values.clone()
    group.all_reduce(x)
    expected = values if dtype == torch.bool else torch.tensor([0, 2, 4, 6, 8]).to(dtype)
    if not dtype.is_complex:
        x, expected = x.double(), expected.double()
    assert torch.equal(x, expected)
    if not dtype.is_complex:
        x = torch.tensor([rank, 1 - rank]).to(dtype)
        group.all_reduce(x, "max", async_op=True).wait()
        assert x.double().tolist() == [1, 1]
    moves(group, rank, dtype)


def moves(group, rank, dtype):
    """Bits, whatever they mean."""
    raw = torch.arange(32, dtype=torch.uint8) + 32 * rank
    x = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    outs = [torch.empty_like(x) for _ in range(2)]
    group.all_gather(outs, x)
    for r, out in enumerate(outs):
        back = torch.arange(32, dtype=torch.uint8) + 32 * r
        assert torch.equal(out.view(torch.uint8), back % 2 if dtype == torch.bool else back)
    y = x.clone()
    group.broadcast(y, 1)
    assert torch.equal(y.view(torch.uint8), outs[1].view(torch.uint8))
    pair = x.view(2, -1).t() if x.numel() % 2 == 0 else x
    strided = torch.empty_like(pair.contiguous()).t().contiguous().t() if pair.dim() == 2 else torch.empty_like(x)
    group.all_to_all([torch.empty_like(x), torch.empty_like(x)], [x, x])
    sent = group.send(pair, 1 - rank, async_op=True)
    group.recv(strided, 1 - rank)
    sent.wait()
    theirs = outs[1 - rank].view(2, -1).t() if pair.dim() == 2 else outs[1 - rank]
    assert torch.equal(strided.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", [name for name in ODD if hasattr(torch, name)])
def test_odd_types_are_moved(pools, name):
    pools(2).run(check_odd, name)


def check_odd(name):
    group, dtype = here().group, named(name)
    moves(group, here().rank, dtype)
    x = torch.zeros(8, dtype=torch.uint8).view(dtype)
    try:
        group.all_reduce(x)
    except tensorwire.MisuseError as error:
        assert name in str(error)
        for call in (
            lambda: group.reduce(x, 0),
            lambda: group.all_reduce_coalesced([x]),
            lambda: group.reduce_scatter_from(torch.zeros(4, dtype=torch.uint8), x),
            lambda: group.reduce_scatter(torch.zeros(8, dtype=torch.uint8), [x, x]),
        ):
            with pytest.raises(tensorwire.MisuseError):
                call()
    group.barrier()


def test_bfloat16_is_rounded_once(pools):
    pools(2).run(check_bfloat16)


def check_bfloat16():
    mine = (256, 1) if here().rank == 0 else (1, 0)
    tensors = [torch.full((5,), value, dtype=torch.bfloat16) for value in mine]
    here().group.all_reduce_multi(tensors)
    assert tensors[0].tolist() == tensors[1].tolist() == [258] * 5  # 256 + 1 is 256 in bfloat16


def test_averages_of_integers_are_refused(pools):
    pools(2).run(check_avg)


def check_avg():
    for dtype in (torch.bool, *INTEGERS):
        x = torch.tensor([1, 0, 1]).to(dtype)
        with pytest.raises(tensorwire.MisuseError, match="AVG|avg"):
            here().group.all_reduce(x, "avg")
        assert x.tolist() == [1, 0, 1]
    here().group.barrier()


def test_layouts(pools):
    pools(2).run(check_layouts)


def check_layouts():
    group, rank = here().group, here().rank
    makes = [
        lambda: torch.zeros(4, 6).t(),
        lambda: torch.zeros(4, 6)[::2, 1:5],
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.zeros(2, 3, 4, 5, 6).permute(4, 2, 0, 1, 3),
        lambda: torch.zeros(()),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(3, 0, 5).transpose(0, 2),
        lambda: torch.zeros(10)[3:],
        lambda: torch.zeros(1, 5).expand(1, 5),
        lambda: torch.zeros([1] * 60 + [2, 3]),
        lambda: torch.nn.Parameter(torch.zeros(4, 3)),
        lambda: torch.zeros(6, requires_grad=True).detach(),
    ]
    for make in makes:
        x = make()
        with torch.no_grad():
            x.copy_(torch.arange(x.numel(), dtype=torch.float32).view(x.shape) + rank)
        group.all_reduce(x)
        assert torch.equal(x.detach(), 2 * torch.arange(x.numel(), dtype=torch.float32).view(x.shape) + 1)
    with pytest.raises(tensorwire.MisuseError):
        group.all_reduce(torch.zeros(1).expand(5))
    out = torch.zeros(10)
    group.all_gather_into(out, torch.full((1,), float(rank)).expand(5))
    assert out.tolist() == [0.0] * 5 + [1.0] * 5


def test_a_clone_that_torch_has_put_off_is_made_first(pools):
    pools(2).run(check_lazy_clone)


def check_lazy_clone():
    group = here().group
    for _ in range(2):
        x = torch.ones(4)
        y = torch._lazy_clone(x)
        group.all_reduce(y)
        assert x.tolist() == [1] * 4
        assert y.tolist() == [2] * 4


def sparse():
    return torch.zeros(4, 4).to_sparse()


class Wrapper(torch.Tensor):
    """Looks like a tensor to Python, with nothing behind it."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


def wrapper():
    return torch.Tensor._make_wrapper_subclass(Wrapper, (4,))


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4)


def nested():
    return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)


REFUSED = {
    "sparse": (sparse, "sparse"),
    "sparse, compressed": (lambda: torch.zeros(4, 4).to_sparse_csr(), "sparse"),
    "meta": (lambda: torch.zeros(4, device="meta"), "meta"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8), "quint8"),
    "conjugated": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "resolve_conj"),
    "negated": (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "mkldnn": (lambda: torch.zeros(4, 4).to_mkldnn(), "mkldnn"),
    "a wrapper without memory": (wrapper, ""),
    "fake": (fake, ""),
    "jagged": (nested, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_are_refused_by_name(pools, name):
    pools(2).run(check_refused, name)


def check_refused(name):
    make, word = REFUSED[name]
    # The first tensor is looked at in another way than all later ones.
    here().group.all_reduce(torch.ones(1))
    try:
        x = make()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this torch cannot make one: {error}"
    # torch's own errors are as good for tensors that exist only inside torch.
    with pytest.raises((tensorwire.TensorwireError, RuntimeError, TypeError)) as caught:
        here().group.send(x, 0, async_op=True).wait(5)
    assert not isinstance(caught.value, TimeoutError)
    assert word in str(caught.value), str(caught.value)


def test_inside_function_transforms(pools):
    """Tensors of vmap and grad have no memory of their own."""
    pools(2).run(check_transforms)


def check_transforms():
    group = here().group

    def body(x):
        group.all_reduce(x)
        return x

    with pytest.raises((tensorwire.TensorwireError, RuntimeError)):
        torch.func.vmap(body)(torch.zeros(3, 4))


def test_shared_memory_as_torch(pools):
    pools(2).run(check_shared)


def check_shared():
    group, rank = here().group, here().rank
    memory = tensorwire.alloc(4 * 1000)
    x = torch.frombuffer(memory, dtype=torch.float32)
    x.fill_(rank + 1)
    group.all_reduce(x[10:20])
    assert x[10:20].tolist() == [3.0] * 10 and x[9] == rank + 1
    del memory
    group.all_reduce(x.view(10, 100).t())
    assert x[0] == 3


def test_torch_numpy_and_bytes_meet(pools):
    pools(2).run(check_mixed)


def check_mixed():
    group, rank = here().group, here().rank
    x = torch.full((4,), 1.0) if rank == 0 else torch.full((4,), 2.0).numpy()
    group.all_reduce(x)
    assert list(x) == [3.0] * 4
    x = torch.zeros(4, dtype=torch.uint8) if rank == 0 else bytearray(b"\1\2\3\4")
    group.broadcast(x, 1)
    assert bytes(bytearray(x)) == b"\1\2\3\4"


def test_something_that_looks_like_torch_comes_first():
    """A type that has is_cpu before torch was imported must not spoil torch's own types."""
    import subprocess
    import sys

    code = """
import tensorwire
from tensorwire import _native
group = _native.Group.from_store(tensorwire.MemoryStore(), 0, 1, timeout=30)
class Odd:
    is_cpu = True
    dtype = "odd"
try:
    group.all_reduce(Odd())
except Exception as error:
    print(type(error).__name__)
import torch
x = torch.ones(3)
group.all_reduce(x)
print("well")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("well\n"), done


MOVES = {
    "storage.resize_": lambda tensor: tensor.untyped_storage().resize_(0),
    "tensor.resize_": lambda tensor: tensor.resize_(1 << 20),
    "tensor.resize_ by name": lambda tensor: tensor.resize_(size=(1 << 20,)),
    "tensor.resize_as_": lambda tensor: tensor.resize_as_(torch.empty(1 << 20)),
    "share_memory_": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("move", MOVES)
def test_storage_of_a_started_work_keeps_its_memory(pools, move):
    """torch frees a storage's memory when it gets other memory: a started operation would use what is freed."""
    pools(2).run(check_memory_is_kept, move)


def check_memory_is_kept(move):
    group, rank = here().group, here().rank
    group.barrier()
    if rank == 1:
        group.barrier()
        group.send(torch.arange(1000.0), 0)
        return
    tensor = torch.zeros(1000)
    part = tensor[10:]
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    work = group.recv(tensor, 1, async_op=True)
    with pytest.raises(tensorwire.MisuseError, match="recv, which was started before"):
        MOVES[move](part)
    assert storage.data_ptr() == address and storage.nbytes() == 4000
    tensor.resize_(0).resize_(1000)  # that keeps the memory
    group.barrier()
    work.wait()
    assert tensor.tolist() == list(range(1000))
    MOVES[move](tensor)
    assert storage.data_ptr() != address


def test_storage_of_a_started_work_is_held(pools):
    """A tensor may get another storage while an operation is under way: then nobody but the operation holds the old one."""
    pools(2).run(check_storage_is_held)


def check_storage_is_held():
    group, rank = here().group, here().rank
    group.barrier()
    if rank == 1:
        group.barrier()
        group.send(torch.arange(8.0), 0)
        return
    memory = numpy.zeros(8, "float32").view(Watched)
    gone = weakref.ref(memory)
    tensor = torch.from_numpy(memory)
    del memory
    work = group.recv(tensor, 1, async_op=True)
    tensor.data = torch.empty(0)
    assert gone() is not None
    assert gone().tolist() == [0.0] * 8
    group.barrier()
    work.wait()
    # What another thread lets go of goes when the interpreter has time.
    deadline = time.monotonic() + 60
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        tensorwire.lease_stats()


class Watched(numpy.ndarray):
    """An array that may have weak references."""
