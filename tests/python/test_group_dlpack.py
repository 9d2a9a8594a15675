"""Whatever speaks DLPack is a tensor; what it hands over is deleted exactly once, also where it is refused."""

import ctypes
import time

import numpy as np
import pytest
from dlpack_producer import GPU, Producer
from ranks import here

import tensorwire


def deleted(producer, count=1):
    """Soon: by the thread that ended the operation."""
    for _ in range(500):
        if producer.deleted >= count:
            break
        time.sleep(0.01)
    assert producer.deleted == count == len(producer.exports), (producer.deleted, count, len(producer.exports))


@pytest.mark.parametrize("versioned", [False, True], ids=["plain", "versioned"])
def test_both_kinds_of_capsules(pools, versioned):
    pools(2).run(check_kind, versioned)


def check_kind(versioned):
    group, rank = here().group, here().rank
    x = Producer([1.0 + rank] * 8, versioned=versioned)
    group.all_reduce(x)
    assert x.values == [3.0] * 8
    deleted(x)
    assert "max_version" in x.asked[0]
    x = Producer([1.0 + rank] * 8, versioned=versioned)
    group.all_reduce(x, async_op=True).wait()
    assert x.values == [3.0] * 8
    deleted(x)
    y = Producer([0.0] * 16, versioned=versioned)
    group.all_gather_into(y, x)
    assert y.values == [3.0] * 16
    deleted(y)
    deleted(x, 2)


def test_layouts(pools):
    pools(1).run(check_layouts)


def check_layouts():
    group = here().group

    def doubled(expected, **facts):
        """premul_sum by two shows which elements the tensor has."""
        x = Producer([1.0] * 8, **facts)
        group.all_reduce(x, ("premul_sum", 2.0))
        assert x.values == expected
        deleted(x)

    doubled([2.0] * 8)
    doubled([2.0] * 8, shape=(2, 4))
    doubled([2.0] * 8, shape=(2, 4), strides=(1, 2))
    doubled([2.0, 1.0] * 4, shape=(4,), strides=(2,))
    doubled([1.0, 2.0] * 4, shape=(4,), strides=(2,), byte_offset=4)
    doubled([2.0] * 4 + [1.0] * 4, shape=(4,), strides=(-1,), byte_offset=12)
    doubled([2.0] + [1.0] * 7, shape=())
    doubled([2.0] + [1.0] * 7, shape=(), strides=())
    doubled([2.0] + [1.0] * 7, shape=(1,) * 64)
    doubled([1.0] * 8, shape=(0,))
    doubled([1.0] * 8, shape=(3, 0, 5), strides=(7, 7, 7), data=None)


def test_a_tensor_without_a_deleter_is_fine(pools):
    pools(1).run(check_no_deleter)


def check_no_deleter():
    x = Producer([1.0] * 8, no_deleter=True)
    here().group.all_reduce(x)
    assert x.deleted == 0


def test_read_only_is_an_input(pools):
    pools(1).run(check_read_only)


def check_read_only():
    group = here().group
    x = Producer([5.0] * 8, flags=1)
    out = np.zeros(8, "f4")
    group.all_gather_into(out, x)
    assert (out == 5).all()
    deleted(x)
    for count, call in enumerate((group.all_reduce, lambda x: group.recv(x, 0), group.recv_any), 2):
        with pytest.raises(tensorwire.MisuseError, match="read-only"):
            call(x)
        deleted(x, count)
    copied = Producer([5.0] * 8, flags=2)  # says that it is a copy: not our business
    group.all_reduce(copied)
    deleted(copied)


REFUSED = {
    "version 2": dict(version=(2, 0)),
    "elements of no type": dict(dtype=(2, 32, 4)),
    "elements of 12 bits": dict(dtype=(2, 12, 1)),
    "handles": dict(dtype=(3, 64, 1)),
    "a negative size": dict(shape=(-1,)),
    "no shape": dict(no_shape=True),
    "a negative number of dimensions": dict(ndim=-1),
    "a size above all memory": dict(shape=(1 << 62, 1 << 62)),
    "a count that wraps to little": dict(shape=(1 << 32, 1 << 32, 1 << 32)),
    "bytes that wrap": dict(shape=((1 << 62) + 2,)),
    "strides that wrap": dict(shape=(2, 3), strides=(1 << 62, 1 << 62)),
    "strides that wrap the sum": dict(shape=(3, 3), strides=(1 << 60, -(1 << 60))),
    "the smallest stride": dict(shape=(2,), strides=(-(1 << 63),)),
    "the smallest stride, thrice": dict(shape=(3, 3), strides=(-(1 << 63), 1)),
    "before the address space": dict(shape=(4,), strides=(-(1 << 58),)),
    "no memory": dict(data=None),
    "a device after all": dict(device=(GPU, 0), says_device=(1, 0)),
}


@pytest.mark.parametrize("versioned", [False, True], ids=["plain", "versioned"])
@pytest.mark.parametrize("name", REFUSED)
def test_lies_are_refused(pools, name, versioned):
    if name == "version 2" and not versioned:
        pytest.skip("plain capsules have no version")
    pools(1).run(check_lie, name, versioned)


def check_lie(name, versioned):
    group = here().group
    for call in (group.all_reduce, lambda x: group.send(x, 0)):
        x = Producer([1.0] * 8, versioned=versioned, **REFUSED[name])
        with pytest.raises((tensorwire.MisuseError, tensorwire.UnsupportedError)):
            call(x)
        deleted(x)
        assert x.values == [1.0] * 8


def test_other_devices_are_refused_without_asking_for_the_tensor(pools):
    pools(1).run(check_device)


def check_device():
    x = Producer(device=(GPU, 3))
    with pytest.raises(tensorwire.UnsupportedError, match="3"):
        here().group.all_reduce(x)
    assert not x.exports


def test_capsules_of_others_are_refused(pools):
    pools(1).run(check_capsules)


def check_capsules():
    group = here().group
    x = Producer(name=b"something else")
    with pytest.raises(tensorwire.MisuseError, match="capsule"):
        group.all_reduce(x)
    assert x.deleted == 0  # not ours to delete
    used = Producer()
    capsule = used.capsule()
    again = Producer(gives=capsule)
    group.all_reduce(again)
    with pytest.raises(tensorwire.MisuseError, match="used"):
        group.all_reduce(again)
    deleted(used)
    for wrong in (None, 3, object()):
        with pytest.raises(tensorwire.MisuseError, match="capsule"):
            group.all_reduce(Producer(gives=wrong))


def test_errors_of_the_producer_are_told(pools):
    pools(1).run(check_producer_errors)


def check_producer_errors():
    group = here().group
    with pytest.raises((tensorwire.MisuseError, BufferError), match="no such luck"):
        group.all_reduce(Producer(raises=BufferError("no such luck")))
    # These are nobody's business but the caller's.
    for kind in (KeyboardInterrupt, MemoryError, SystemExit):
        with pytest.raises(kind):
            group.all_reduce(Producer(raises=kind("now")))


def test_what_was_taken_is_deleted_when_a_later_tensor_is_refused(pools):
    pools(1).run(check_partial)


def check_partial():
    group = here().group
    good, bad = Producer(), Producer(shape=(-1,))
    with pytest.raises(tensorwire.MisuseError):
        group.all_reduce_coalesced([good, bad])
    deleted(good)
    deleted(bad)
    good = Producer()
    with pytest.raises(tensorwire.MisuseError):
        group.send(good, 7)
    deleted(good)
    good = Producer()
    with pytest.raises(tensorwire.MisuseError):
        group.all_reduce(good, "band")
    deleted(good)


def test_many_are_deleted_once_each(pools):
    pools(2).run(check_many)


def check_many():
    group = here().group
    producers = [Producer([float(i)] * 8) for i in range(200)]
    for producer in producers:
        group.all_reduce(producer, async_op=True)
    group.barrier()
    for i, producer in enumerate(producers):
        assert producer.values == [2.0 * i] * 8
        deleted(producer)


def test_a_group_that_goes_lets_go_of_its_tensors(pools):
    pools(2).run(check_let_go)


def check_let_go():
    group, rank = here().fresh(), here().rank
    x = Producer()
    work = group.recv(x, 1 - rank, async_op=True)
    group.barrier()
    group.abort("enough")
    with pytest.raises(tensorwire.TensorwireError):
        work.wait()
    deleted(x)


def test_the_size_of_our_structs():
    """As dlpack.h has them."""
    from dlpack_producer import Plain, Tensor, Versioned

    assert (ctypes.sizeof(Tensor), ctypes.sizeof(Plain), ctypes.sizeof(Versioned)) == (48, 64, 80)
