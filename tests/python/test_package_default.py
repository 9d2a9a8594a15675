"""The default group of a process, and arrays in shared memory."""

import os
import pathlib
import subprocess
import sys

import pytest

import tensorwire

np = pytest.importorskip("numpy")


@pytest.fixture
def address(tmp_path):
    """Where a group can meet. Afterwards there is no default group."""
    yield f"file://{tmp_path}/meet"
    tensorwire.finalize()


def test_init_gives_the_default_group(address):
    group = tensorwire.init(address, rank=0, world=1, timeout=7)
    assert tensorwire.group() is group
    assert (group.rank, group.world, group.timeout.total_seconds()) == (0, 1, 7)


def test_init_with_a_store(address):
    group = tensorwire.init(store=tensorwire.MemoryStore(), rank=0, world=1)
    numbers = np.arange(3.0)
    group.all_reduce(numbers)
    assert numbers.tolist() == [0, 1, 2]


def test_no_group_without_init(address):
    with pytest.raises(tensorwire.MisuseError, match=r"tensorwire\.init\(\)"):
        tensorwire.group()


def test_second_init_says_what_to_do(address):
    tensorwire.init(address, rank=0, world=1)
    with pytest.raises(tensorwire.MisuseError, match=r"finalize\(\).*subgroup\(\)"):
        tensorwire.init()


def test_init_again_after_finalize(tmp_path, address):
    first = tensorwire.init(address, rank=0, world=1)
    tensorwire.finalize()
    with pytest.raises(tensorwire.MisuseError, match="closed"):
        first.barrier()
    assert tensorwire.init(f"file://{tmp_path}/other", rank=0, world=1) is not first
    tensorwire.finalize()
    tensorwire.finalize()


def test_failed_init_leaves_no_group(address):
    with pytest.raises(tensorwire.TimeoutError, match="rank 1"):
        tensorwire.init(address, rank=0, world=2, timeout=0.2)
    with pytest.raises(tensorwire.MisuseError):
        tensorwire.group()


@pytest.mark.parametrize(
    "args, text",
    [
        ({"url": "tcp://a:1", "store": tensorwire.MemoryStore()}, "not both"),
        ({"store": tensorwire.MemoryStore(), "rank": 0}, "world="),
        ({"rank": 0, "world": 2}, "url"),
        ({"url": "http://a:1", "rank": 0, "world": 1}, "tcp"),
        ({"url": "file:///x/y"}, "rank"),
    ],
)
def test_wrong_arguments(args, text):
    with pytest.raises(tensorwire.MisuseError, match=text):
        tensorwire.init(**args)
    with pytest.raises(tensorwire.MisuseError):
        tensorwire.group()


def test_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(tensorwire.MisuseError, match="tensorwire run"):
        tensorwire.init()


def test_end_of_the_process_closes_the_group(tmp_path):
    # A group that is closed removes the file where it met.
    code = f"import tensorwire; tensorwire.init('file://{tmp_path}/meet', rank=0, world=1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize("shape", [(), 0, 5, (0, 3), (2, 3), [4, 1], np.int64(3), (1 << 12, 1 << 8)])
@pytest.mark.parametrize("dtype", ["float32", "f8", bool, np.int16, np.dtype("complex64")])
def test_empty_is_an_array(shape, dtype):
    array = tensorwire.empty(shape, dtype)
    wanted = np.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
    assert array.flags.writeable and array.flags.c_contiguous and not array.any()
    array[...] = 1
    assert (array == 1).all()


def test_empty_is_in_shared_memory():
    array = tensorwire.empty((100, 1000))
    assert array.dtype == np.float32
    address = array.__array_interface__["data"][0]
    spans = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    (flags,) = [span[1] for span in spans if holds(span[0], address)]
    assert flags == "rw-s"


def holds(span, address):
    low, high = (int(end, 16) for end in span.split("-"))
    return low <= address < high


def test_empty_is_given_back():
    def mapped():
        return sum("tensorwire" in line for line in pathlib.Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    array = tensorwire.empty(1 << 20)
    part = array[5:7]
    del array
    assert mapped() > before
    del part
    assert mapped() == before


def test_empty_of_an_extension():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert tensorwire.empty(3, ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "shape, dtype, text",
    [
        (3, "float99", "float99"),
        (3, object, "Python objects"),
        (-1, "float32", "negative"),
        ((2, -3), "float32", "negative"),
        (1.5, "float32", "shape"),
        ("12", "float32", "shape"),
    ],
)
def test_wrong_arrays(shape, dtype, text):
    with pytest.raises(tensorwire.MisuseError, match=text):
        tensorwire.empty(shape, dtype)


def test_empty_without_numpy():
    code = """
import sys, tensorwire
sys.modules["numpy"] = None
try:
    tensorwire.empty(3)
except tensorwire.UnsupportedError as error:
    assert "pip install numpy" in str(error), error
else:
    raise SystemExit("no error")
assert tensorwire.alloc(12).nbytes == 12
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ)


def test_an_old_name_is_told_by_the_new_one(tmp_path):
    calls = [
        lambda **size: tensorwire.init(f"file://{tmp_path}/meet", rank=0, **size),
        lambda **size: tensorwire.Group.from_url(f"file://{tmp_path}/meet", rank=0, **size),
        lambda **size: tensorwire.Group.from_store(tensorwire.MemoryStore(), rank=0, **size),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="'world_size': the number of ranks is called 'world'"):
            call(world_size=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
            call(size=1)
        call(world=1).close()
        tensorwire.finalize()
    with pytest.raises(TypeError, match="'world'"):
        tensorwire.Group.from_store(tensorwire.MemoryStore(), 0)
