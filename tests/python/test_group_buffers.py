"""Whatever speaks the buffer protocol is a tensor, or is refused by name."""

import array
import ctypes
import mmap
import pickle

import numpy as np
import pytest
from ranks import here

import tensorwire

WRITABLE = {
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(bytearray(8)),
    "memoryview, cast": lambda: memoryview(bytearray(8)).cast("i"),
    "memoryview, strided": lambda: memoryview(bytearray(16))[::2],
    "memoryview, reversed": lambda: memoryview(bytearray(8))[::-1],
    "memoryview, two dimensions": lambda: memoryview(bytearray(8)).cast("b", (2, 4)),
    "array of ints": lambda: array.array("i", [0] * 8),
    "array of doubles": lambda: array.array("d", [0] * 8),
    "array of unsigned long": lambda: array.array("L", [0] * 8),
    "array of bytes": lambda: array.array("b", [0] * 8),
    "ctypes array of int": lambda: (ctypes.c_int * 8)(),
    "ctypes array of double": lambda: (ctypes.c_double * 8)(),
    "ctypes array of arrays": lambda: ((ctypes.c_int16 * 4) * 2)(),
    "ctypes scalar": lambda: ctypes.c_int64(),
    "ctypes array of uint8": lambda: (ctypes.c_uint8 * 8)(),
    "ctypes array of size_t": lambda: (ctypes.c_size_t * 8)(),
    "mmap": lambda: mmap.mmap(-1, 64),
    "numpy scalar array": lambda: np.zeros((), "f8"),
    "memory": lambda: tensorwire_alloc(64),
}


def tensorwire_alloc(nbytes):
    from tensorwire import _native

    return _native.alloc(nbytes)


@pytest.mark.parametrize("name", WRITABLE)
def test_writable_buffers(pools, name):
    pools(2).run(check_writable, name)


def check_writable(name):
    group, rank = here().group, here().rank
    value = WRITABLE[name]()
    seen = np.asarray(value)
    seen[...] = rank + 1
    group.all_reduce(value)
    assert (np.asarray(value) == 3).all(), np.asarray(value)
    seen[...] = rank + 1
    group.broadcast(value, 1, async_op=True).wait()
    assert (np.asarray(value) == 2).all()


READ_ONLY = {
    "bytes": lambda: b"12345678",
    "memoryview of bytes": lambda: memoryview(b"12345678"),
    "read-only memoryview": lambda: memoryview(bytearray(b"12345678")).toreadonly(),
    "read-only array": lambda: locked(np.frombuffer(b"12345678", "u1")),
    "read-only mmap": lambda: read_only_mmap(),
}


def locked(array):
    array.flags.writeable = False
    return array


def read_only_mmap():
    return mmap.mmap(-1, 8, prot=mmap.PROT_READ)


@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_buffers_are_inputs(pools, name):
    pools(2).run(check_read_only, name)


def check_read_only(name):
    group, rank = here().group, here().rank
    value = READ_ONLY[name]()
    before = bytes(value)
    out = bytearray(16)
    group.all_gather_into(out, value)
    assert out == before * 2
    group.broadcast(value if rank == 0 else bytearray(8), 0)
    group.reduce(value if rank == 0 else bytearray(8), 1)
    for call in (
        lambda: group.all_reduce(value),
        lambda: group.all_reduce_coalesced([bytearray(8), value]),
        lambda: group.broadcast(value, 1 - rank),
        lambda: group.reduce(value, rank),
        lambda: group.recv(value, 1 - rank),
        lambda: group.recv_any(value),
        lambda: group.all_gather([bytearray(8), value], b"12345678"),
        lambda: group.scatter(value, [], 1 - rank),
        lambda: group.all_to_all_into(value, b"12345678"),
        lambda: group.reduce_scatter_from(value, bytes(16)),
    ):
        with pytest.raises(tensorwire.MisuseError, match="read-only"):
            call()
    assert bytes(value) == before
    group.barrier()


REFUSED = {
    "big-endian int": (lambda: np.zeros(4, ">i4"), ">i"),
    "big-endian double": (lambda: np.zeros(4, ">f8"), ">d"),
    "big-endian complex": (lambda: np.zeros(4, ">c16"), ">Zd"),
    "long double": (lambda: np.zeros(4, np.longdouble), "g"),
    "long complex": (lambda: np.zeros(4, np.clongdouble), "Zg"),
    "record": (lambda: np.zeros(4, "i4,f4"), "T{"),
    "text": (lambda: np.zeros(4, "U3"), "w"),
    "bytes of fixed size": (lambda: np.zeros(4, "S3"), "3s"),
    "raw": (lambda: np.zeros(4, "V4"), "4x"),
    "objects": (lambda: np.zeros(4, object), "O"),
    "dates": (lambda: np.zeros(4, "M8[s]"), "datetime64"),
    "durations": (lambda: np.zeros(4, "m8[s]"), "timedelta64"),
    "ctypes structure": (lambda: Pair(), "T{"),
    "ctypes big-endian": (lambda: (ctypes.c_int.__ctype_be__ * 4)(), ">i"),
    "ctypes pointers": (lambda: (ctypes.c_void_p * 4)(), "P"),
    "wide characters": (lambda: array.array("u", "abcd"), "w"),
    "list": (lambda: [1, 2, 3], "list"),
    "int": (lambda: 3, "int"),
    "None": (lambda: None, "NoneType"),
    "str": (lambda: "abc", "str"),
}


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]


@pytest.mark.parametrize("name", REFUSED)
def test_other_buffers_are_refused_by_name(pools, name):
    pools(1).run(check_named, name)


def check_named(name):
    group, (make, part) = here().group, REFUSED[name]
    for call in (group.all_reduce, lambda x: group.broadcast(x, 0), lambda x: group.send(x, 0)):
        with pytest.raises((tensorwire.MisuseError, TypeError)) as caught:
            call(make())
        assert part in str(caught.value), str(caught.value)


#: What is refused, and the words of its error: NumPy's name of the type, and how to give it instead.
FIXES = {
    "other byte order": (np.arange(4, dtype=">i4"), ">i4", 'x.astype(x.dtype.newbyteorder("="))'),
    "other byte order, complex": (np.arange(4, dtype=">c16"), ">c16", 'x.astype(x.dtype.newbyteorder("="))'),
    "long double": (np.arange(4, dtype="longdouble"), str(np.dtype("longdouble")), 'x.astype("float64")'),
    "long complex": (np.arange(4, dtype="clongdouble"), str(np.dtype("clongdouble")), 'x.astype("complex128")'),
    "record": (np.zeros(4, "<i4,>f4"), "[('f0', '<i4'), ('f1', '>f4')]", 'x.view("uint8")'),
    "text": (np.array(["a", "bc"]), "<U2", 'x.view("uint8")'),
    "bytes of fixed size": (np.array([b"a", b"bc"]), "|S2", 'x.view("uint8")'),
    "dates": (np.zeros(4, "M8[s]"), "datetime64[s]", 'x.view("int64")'),
    "durations": (np.zeros(4, "m8[ns]"), "timedelta64[ns]", 'x.view("int64")'),
    "objects": (np.array([1, "a"], object), "object", 'numpy.frombuffer(pickle.dumps(x), "uint8")'),
    "no array": (array.array("u", "abcd"), '"w"', 'memoryview(x).cast("B")'),
}


@pytest.mark.parametrize("name", FIXES)
def test_an_unknown_type_is_named_as_numpy_does_and_its_error_has_the_fix(pools, name):
    pools(1).run(check_fix, name)


def check_fix(name):
    group, (x, dtype, fix) = here().group, FIXES[name]
    with pytest.raises(tensorwire.MisuseError) as caught:
        group.send(x, 0)
    text = str(caught.value)
    assert f" {dtype}" in text and fix in text, text
    given = eval(fix, {"x": x, "numpy": np, "pickle": pickle})
    got = bytearray(memoryview(given).nbytes)
    group.all_gather([np.frombuffer(got, np.asarray(given).dtype)], given)
    assert got == bytes(given)


def test_strides_of_part_of_an_element_are_refused(pools):
    pools(1).run(check_part_strides)


def check_part_strides():
    group = here().group
    fields = np.zeros(4, [("a", "u1"), ("b", "<i4"), ("c", "u1")])["b"]  # 6 bytes from one to the next
    with pytest.raises(tensorwire.MisuseError, match="whole elements"):
        group.all_reduce(fields)
    whole = np.zeros(4, [("a", "<i4"), ("b", "<i4")])
    whole["b"] = 3
    group.all_reduce(whole["b"])
    assert (whole["b"] == 3).all() and not whole["a"].any()


def test_a_buffer_stays_exported_while_in_flight_and_no_longer(pools):
    pools(2).run(check_export)


def check_export():
    group, rank = here().group, here().rank
    if rank == 0:
        value = bytearray(8)
        work = group.recv(value, 1, async_op=True)
        with pytest.raises(BufferError):
            value.append(1)  # would move it
        group.barrier()
        work.wait()
        released(lambda: value.append(1))
        assert value == b"\2" * 8 + b"\1"
    else:
        group.barrier()
        group.send(bytes([2] * 8), 0)
    value = bytearray(8)
    group.all_reduce(value)
    value.append(1)
    work = group.all_reduce(bytearray(9), async_op=True)
    work.wait()
    # An error lets go, too.
    with pytest.raises(tensorwire.MisuseError):
        group.send(value, 5)
    value.append(1)


def released(change):
    """The buffer is let go soon after the end of the work, by whichever thread ended it."""
    import time

    for _ in range(500):
        try:
            return change()
        except BufferError:
            time.sleep(0.01)
    change()


def test_memory_stays_until_the_work_is_over(pools):
    pools(2).run(check_alive)


class Tracked(np.ndarray):
    """Takes weak references."""


def check_alive():
    import gc
    import time
    import weakref

    group, rank = here().group, here().rank
    if rank == 0:
        x = np.zeros(1000, "f8").view(Tracked)
        owner = weakref.ref(x)
        work = group.recv(x, 1, async_op=True)
        del x
        gc.collect()
        assert owner() is not None
        group.barrier()
        work.wait()
        kept = owner()
        assert kept is None or (kept == 4).all()
        del kept
        for _ in range(500):
            if owner() is None:
                break
            time.sleep(0.01)
        assert owner() is None, "kept although the work is over"
        del work
    else:
        group.barrier()
        group.send(np.full(1000, 4.0), 0)


def test_a_dropped_work_goes_on(pools):
    pools(2).run(check_dropped)


def check_dropped():
    group, rank = here().group, here().rank
    works = [np.full(100, rank + i, "i8") for i in range(20)]
    for x in works:
        group.all_reduce(x, async_op=True)
    group.barrier()
    for i, x in enumerate(works):
        assert (x == 1 + 2 * i).all()
