"""All-reduce of sparse arrays of NumPy and SciPy, against dense arrays, in worlds of 1, 2 and 3."""

import asyncio
import gc
import math
import random
import secrets
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from group_model import DTYPES, OPS, allowed, reduced, same
from ranks import here

import tensorwire

try:
    import scipy.sparse as scipy
except ImportError:
    scipy = None

needs_scipy = pytest.mark.skipif(scipy is None, reason="SciPy is not installed")
WORLDS = [1, 2, 3]


def test_nothing_is_imported_before_it_is_needed():
    code = "import sys, tensorwire, tensorwire.sparse; assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = "import sys, tensorwire; assert 'tensorwire.sparse' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def drawn(rank, size, dims, dtype, seed, share=0.4):
    """Keys of a rank, sorted, and a row for each."""
    random = np.random.default_rng([rank, seed])
    keys = np.flatnonzero(random.random(size) < share)
    return keys, random.integers(1, 4, (len(keys), *dims)).astype(dtype)


def model(parts, op):
    """Keys and rows of the result: absent elements take no part, and an average is that of all ranks."""
    found = {}
    for keys, rows in parts:
        for key, row in zip(keys.tolist(), rows, strict=True):
            found.setdefault(key, []).append(row)
    keys = sorted(found)
    if op == "avg":
        rows = [(reduced("sum", found[key]) / len(parts)).astype(found[key][0].dtype) for key in keys]
    else:
        rows = [reduced(op, found[key]) for key in keys]
    like = parts[0][1]
    return np.array(keys, "int64"), np.array(rows, like.dtype).reshape(len(keys), *like.shape[1:])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays(pools, world, dtype):
    pools(world).run(check_arrays, dtype)


def check_arrays(dtype):
    group, rank, world = here().group, here().rank, here().world
    for op in filter(lambda op: allowed(op, dtype), OPS):
        for size, dims in ((1, ()), (50, (2, 3)), (400, (1,)), (400, (0,))):
            parts = [drawn(r, size, dims, dtype, size) for r in range(world)]
            keys, rows = parts[rank]
            before = keys.copy(), rows.copy()
            found = group.all_reduce_sparse((keys, rows, size), op)
            expected = model(parts, op)
            assert found[0].dtype == np.int64 and found[0].tolist() == expected[0].tolist() and found[2] == size
            assert found[1].shape == expected[1].shape
            same(found[1], expected[1], f"{op} of {dtype}, {size} {dims}")
            assert np.array_equal(keys, before[0]) and np.array_equal(rows, before[1])


@pytest.mark.parametrize("world", WORLDS)
def test_random_shapes(pools, world):
    seed = secrets.randbits(32)
    print("seed", seed)
    pools(world).run(check_random_shapes, seed)


def check_random_shapes(seed):
    """0 to 4 sparse dimensions and 0 to 3 of a row, any density, some elements twice, against a dictionary."""
    group, rank, world = here().group, here().rank, here().world
    dice = random.Random(seed)
    for case in range(60):
        shape = tuple(dice.choice((0, *[dice.randint(1, 5)] * 9)) for _ in range(dice.randint(0, 4)))
        dims = tuple(dice.choice((0, *[dice.randint(1, 4)] * 9)) for _ in range(dice.randint(0, 3)))
        op, dtype = dice.choice(("sum", "product", "min", "max")), dice.choice(("int64", "int8", "float64"))
        counts = [dice.choice((0, 1, dice.randint(0, 40), dice.randint(0, 400))) for _ in range(world)]
        size = math.prod(shape)
        parts, found = [], {}
        for rank_of in range(world):
            numbers = np.random.default_rng([seed, case, rank_of])
            keys = numbers.integers(0, max(size, 1), counts[rank_of] if size else 0)
            rows = numbers.integers(0, 2, (len(keys), *dims)).astype(dtype)
            if dice.random() < 0.5:
                keys, first = np.unique(keys, return_index=True)
                rows = rows[first]
            parts.append((keys, rows))
            mine = {}
            for key, row in zip(keys.tolist(), rows, strict=True):
                mine[key] = (mine[key] + row).astype(dtype) if key in mine else row  # added up on its rank
            for key, row in mine.items():
                found.setdefault(key, []).append(row)
        keys, rows = parts[rank]
        what = f"seed {seed}, case {case}: {op} of {dtype}, {shape} {dims}, {counts}"
        got = group.all_reduce_sparse((keys, rows, shape), op)
        assert got[0].tolist() == sorted(found) and got[2] == shape, what
        assert got[1].shape == (len(found), *dims) and got[1].dtype == dtype, what
        expected = [reduced(op, found[key]) for key in sorted(found)]
        assert np.array_equal(got[1], np.array(expected, dtype).reshape(got[1].shape)), what


@pytest.mark.parametrize("world", WORLDS)
def test_keys_of_any_kind(pools, world):
    pools(world).run(check_keys)


def check_keys():
    group, rank, world = here().group, here().rank, here().world
    total = world * (world + 1) / 2
    # Unsorted, and some twice: they are added up first, whatever the operation is.
    keys, rows, shape = group.all_reduce_sparse(
        (np.array([9, 3, 9, 0], "uint16"), np.arange(4.0) * (rank + 1), (2, 5)), "max"
    )
    assert (keys.tolist(), rows.tolist(), shape) == ([0, 3, 9], [3 * world, world, 2 * world], (2, 5))
    # Rows with gaps between them, and lists.
    keys, rows, _ = group.all_reduce_sparse((np.arange(6)[::2], np.ones((3, 4))[:, ::2], 10))
    assert keys.tolist() == [0, 2, 4] and rows.tolist() == [[world] * 2] * 3
    # Without a shape a key is any number.
    keys, rows = group.all_reduce_sparse(([2**62 + rank, 5], [[1.0, rank + 1.0]] * 2))
    assert keys.tolist() == [5] + [2**62 + r for r in range(world)] and rows[0].tolist() == [world, total]
    # None at all.
    keys, rows, _ = group.all_reduce_sparse((np.empty(0, "int64"), np.empty((0, 3), "float32"), 7))
    assert keys.shape == (0,) and rows.shape == (0, 3) and rows.dtype == np.float32
    keys, rows, _ = group.all_reduce_sparse((np.arange(int(rank == 0)), np.ones((int(rank == 0), 3)), 7))
    assert keys.tolist() == [0] and rows.tolist() == [[1, 1, 1]]
    # What comes back lies in shared memory, and can be changed.
    rows *= 2
    group.all_reduce(rows)
    assert rows.tolist() == [[2 * world] * 3]


@pytest.mark.parametrize("world", [2])
def test_in_flight(pools, world):
    pools(world).run(check_in_flight)


def check_in_flight():
    group, rank, world = here().group, here().rank, here().world
    works = []
    for step in range(20):
        works.append(group.all_reduce_sparse(([rank, 7], [step, 1], 10), async_op=True))
        works.append(group.all_reduce(np.ones(100), async_op=True))
    for step, work in enumerate(works[::2]):
        work.wait()
        keys, rows, _ = work.result()
        assert keys.tolist() == [0, 1, 7] and rows.tolist() == [step, step, world]
        assert work.result()[0] is keys, "it is made once"
        assert work.done() and work.error() is None and work.duration >= 0 and work.name == "all_reduce_sparse"
    assert group.barrier().result() is None and works[1].result() is None

    async def awaited():
        work = group.all_reduce_sparse(([1], [2.0]), async_op=True)
        await work
        return work.result()

    assert asyncio.run(awaited())[1].tolist() == [2.0 * world]
    if rank == 0:
        work = group.all_reduce_sparse(([1], [2.0]), async_op=True)
        with pytest.raises(tensorwire.MisuseError, match="not over"):
            work.result()
        group.send(np.ones(1), 1)
        work.wait()
    else:
        group.recv(np.ones(1), 0)
        group.all_reduce_sparse(([1], [2.0]))
    # What is reduced is held until then, and not longer than the work and its result.
    rows, gone = np.ones(1000), threading.Event()
    weakref.finalize(rows, gone.set)
    work = group.all_reduce_sparse((np.arange(1000), rows), async_op=True)
    del rows
    work.wait()
    result = work.result()
    assert result[1].tolist() == [world] * 1000
    del work
    gc.collect()
    assert gone.wait(60) and result[1].tolist() == [world] * 1000


def test_dense_where_that_is_cheaper(pools):
    pools(2).run(check_dense)


def check_dense():
    group = here().fresh()
    group.all_reduce_sparse((np.arange(3), np.ones((3, 100)), 100_000))
    assert "dense" not in group.explain()
    keys, rows, _ = group.all_reduce_sparse((np.arange(1000), np.ones((1000, 100)), 1000))
    assert len(keys) == 1000 and (rows == 2).all()
    assert "went dense" in group.explain(), group.explain()
    for dense in (False, True):
        work = group._all_reduce_sparse(np.arange(5), np.ones(5), [10], [], dense=dense)
        keys, rows = work.result()
        assert np.frombuffer(rows).tolist() == [2] * 5 and np.frombuffer(keys, "int64").tolist() == list(range(5))


@needs_scipy
@pytest.mark.parametrize("world", WORLDS)
def test_scipy(pools, world):
    pools(world).run(check_scipy)


def check_scipy():
    group, rank, world = here().group, here().rank, here().world
    for seed in range(12):
        shape = [(7, 5), (1, 40), (30, 1), (64, 64)][seed % 4]
        for dtype in ("float32", "float64", "int8", "uint64", "complex128", "bool"):
            all_of_them = [pieces(r, shape, dtype, seed) for r in range(world)]
            for form in ("coo", "csr", "csc"):
                for kind in ("array", "matrix"):
                    mine = getattr(scipy, f"coo_{kind}")(all_of_them[rank], shape=shape).asformat(form)
                    before = mine.copy()
                    found = group.all_reduce_sparse(mine)
                    dense = [scipy.coo_array(part, shape=shape).toarray() for part in all_of_them]
                    expected = np.logical_or.reduce(dense) if dtype == "bool" else sum(dense[1:], dense[0])
                    what = f"{form}_{kind} of {dtype}, {seed}"
                    assert type(found) is type(mine) and found.dtype == dtype and found.shape == shape, what
                    assert found.has_canonical_format and np.array_equal(found.toarray(), expected.astype(dtype)), what
                    assert found.nnz == len(found.data)
                    assert (before != mine).nnz == 0 and np.array_equal(before.data, mine.data), what


def pieces(rank, shape, dtype, seed):
    """Values and their places; some places are there twice, and none on some ranks."""
    random = np.random.default_rng([rank, seed])
    count = 0 if (rank + seed) % 5 == 0 else int(random.integers(1, 30))
    return random.integers(1, 9, count).astype(dtype), tuple(random.integers(0, size, count) for size in shape)


@needs_scipy
def test_scipy_of_other_shapes(pools):
    pools(2).run(check_scipy_shapes)


def check_scipy_shapes():
    group, rank = here().group, here().rank
    one = group.all_reduce_sparse(scipy.coo_array(([1.0, 2.0], ([4, 2],)), shape=(6,)))
    assert one.shape == (6,) and one.toarray().tolist() == [0, 0, 4, 0, 2, 0]
    line = group.all_reduce_sparse(scipy.csr_array(np.array([0.0, rank + 1, 5])))
    assert isinstance(line, scipy.csr_array) and line.toarray().tolist() == [0, 3, 10]
    try:
        cube = scipy.coo_array(np.arange(24).reshape(2, 3, 4) % 3)
    except (TypeError, ValueError):
        return  # an old SciPy
    found = group.all_reduce_sparse(cube, "product")
    assert np.array_equal(found.toarray(), (np.arange(24).reshape(2, 3, 4) % 3) ** 2)


@needs_scipy
def test_averages_and_work_of_scipy(pools):
    pools(3).run(check_scipy_work)


def check_scipy_work():
    group, rank = here().group, here().rank
    mine = scipy.csr_array(([3.0, 6.0], ([0, rank], [0, 1])), shape=(3, 3))
    work = group.all_reduce_sparse(mine, "avg", timeout=30, async_op=True)
    work.wait()
    assert work.result().toarray().tolist() == [[3, 2, 0], [0, 2, 0], [0, 2, 0]]


def test_refusals(pools):
    pools(2).run(check_refusals)


def check_refusals():
    group, rank = here().group, here().rank
    for wrong, text in (
        (np.ones(3), "no sparse tensor"),
        (3, "no sparse tensor"),
        (([0.5], [1.0], 3), "keys are integers"),
        (([[1]], [1.0], 3), "keys are integers"),
        (([1], [1.0, 2.0], 3), "one row"),
        (([1], 3.0, 3), "one row"),
    ):
        with pytest.raises(tensorwire.MisuseError, match=text):
            group.all_reduce_sparse(wrong)
    with pytest.raises(tensorwire.MisuseError, match="datetime64"):
        group.all_reduce_sparse(([1], np.zeros(1, "M8[s]"), 3))
    with pytest.raises(tensorwire.MisuseError, match="there is no op"):
        group.all_reduce_sparse(([1], [1.0], 3), "mean")
    with pytest.raises(tensorwire.MisuseError, match="AVG of int64"):
        group.all_reduce_sparse(([1], [1], 3), "avg")
    with pytest.raises(TypeError, match="keyword"):
        group.all_reduce_sparse(([1], [1], 3), root=1)
    with pytest.raises(tensorwire.MisuseError, match="without gaps"):
        group._all_reduce_sparse(np.arange(2), np.ones((2, 4))[:, ::2], [3], [2])
    with pytest.raises(tensorwire.MisuseError, match="without gaps"):
        group._all_reduce_sparse(np.arange(4)[::2], np.ones(2), [3], [])
    with pytest.raises(tensorwire.MisuseError, match="no rows of shape"):
        group._all_reduce_sparse(np.arange(2), np.ones((3, 2)), [3], [2])
    if scipy is not None:
        with pytest.raises(tensorwire.MisuseError, match="tocsr"):
            group.all_reduce_sparse(scipy.lil_array((3, 3)))
    # A key that one rank should not have is told to all, and the group goes on.
    for bad in (-1, 10):
        error = tensorwire.MisuseError if rank == 1 else tensorwire.PeerError
        with pytest.raises(error, match=rf"{bad}\b"):
            group.all_reduce_sparse(([bad if rank == 1 else 1], [1.0], 10))
    assert group.all_reduce_sparse(([1], [1.0], 10))[1].tolist() == [2]


def test_what_one_rank_cannot_prepare_is_told_to_all(pools):
    pools(2).run(check_troubled)


def check_troubled():
    group, rank = here().group, here().rank

    def told(tensor, error, text):
        with pytest.raises(error if rank == 1 else tensorwire.PeerError, match=text) as caught:
            group.all_reduce_sparse(tensor)
        assert rank == 1 or (caught.value.rank == 1 and "rank 1" in str(caught.value)), caught.value

    rights = [([1], [[1.0, 2.0]], (2, 5))]
    wrongs = [
        (([0.5], [[1.0, 2.0]], (2, 5)), "keys are integers"),
        (([1, 2], [[1.0, 2.0]], (2, 5)), "one row"),
        (([1], 3.0, (2, 5)), "one row"),
        (([1], [[1.0, 2.0], [3.0]], (2, 5)), "inhomogeneous"),
        (([1], [[1.0, 2.0]], (2, -5)), r"no negative sizes: \(2, -5\)"),
        (([1], [[1.0, 2.0]], -1), "no negative sizes: -1"),
        (([1], [[1.0, 2.0]], "ten"), "a shape is a number"),
        (([1], [[1.0, 2.0]], (2, 2**63)), "more keys than 2.63"),
        (([1], [[1.0, 2.0]], (2, 2**62)), "more keys than 2.63"),
        (([1], [[1.0, 2.0]], (2**64, 1)), "more keys than 2.63"),
        (([1],), "no sparse tensor"),
    ]
    if scipy is not None:
        rights.append(scipy.csr_array(np.eye(3)))
        wrongs.append((scipy.lil_array(np.eye(3)), "tocsr"))
    for wrong, text in wrongs:
        right = rights[0] if isinstance(wrong, tuple) else rights[1]
        told(wrong if rank == 1 else right, (tensorwire.MisuseError, ValueError), text)
        assert group.all_reduce_sparse(([1], [1.0], 10))[1].tolist() == [2]

    def short(keys, rows):
        if rank == 1 and len(keys):
            raise MemoryError("no room for keys")
        return keys, rows

    for right in rights:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tensorwire.sparse._coalesced", short)
            told(right, MemoryError, "no room for keys")
        assert group.all_reduce_sparse(([1], [1.0], 10))[1].tolist() == [2]


def test_memory_that_is_short_at_the_end_is_told_to_all(pools):
    pools(2).run(check_short_at_the_end)


def check_short_at_the_end():
    """What a result is made of needs memory, too. If one rank has none, no rank says that all went well."""
    group, rank = here().group, here().rank

    def short(*_, **__):
        raise MemoryError("no room for indices")

    expected = np.diag([2, 2, 2])
    for form in ("coo", "csr", "csc") if scipy is not None else ():
        for asynchronous in (False, True):
            mine = scipy.csr_array(np.eye(3)).asformat(form)
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr("tensorwire.sparse.unflatten", short)
                with pytest.raises(tensorwire.TensorwireError, match="no room for indices") as caught:
                    work = group.all_reduce_sparse(mine, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
            assert "emory" in str(caught.value)
            if rank == 0:
                assert isinstance(caught.value, tensorwire.PeerError) and caught.value.rank == 1, caught.value
            work = group.all_reduce_sparse(mine, async_op=True)
            work.wait()
            assert np.array_equal(work.result().toarray(), expected) and work.result() is work.result()


def test_mismatches_name_the_shapes(pools):
    pools(2).run(check_mismatches)


def check_mismatches():
    rank = here().rank
    for first, second, texts in (
        (([1], [1.0], 10), ([1], [1.0], 11), ("[10]", "[11]")),
        (([1], [[1.0]], 10), ([1], [1.0], 10), ("[10, 1]", "[10]")),
        (([1], [1.0], 10), ([1], [1], 10), ("float64", "int64")),
    ):
        group = here().fresh()
        with pytest.raises(tensorwire.MismatchError) as caught:
            group.all_reduce_sparse(first if rank == 0 else second)
        assert texts[rank] in str(caught.value), caught.value
    group = here().fresh()
    with pytest.raises(tensorwire.MismatchError):
        group.all_reduce_sparse(([1], [1.0], 10)) if rank == 0 else group.all_reduce(np.ones(1))


def test_a_rank_that_does_not_come(pools):
    pools(2).run(check_late)


def check_late():
    group, rank = here().fresh(), here().rank
    if rank == 0:
        with pytest.raises(TimeoutError, match="rank 1"):
            group.all_reduce_sparse(([1], [1.0], 10), timeout=0.3)
    here().group.barrier()  # until then rank 1 is there
    group.close()
