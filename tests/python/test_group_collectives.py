"""Every operation with every type and op of NumPy against a plain model, in worlds of 1, 2 and 3."""

import numpy as np
import pytest
from group_model import DTYPES, FLOATS, INTEGERS, OPS, allowed, reduced, same, values
from ranks import here

import tensorwire

WORLDS = [1, 2, 3]
#: Little, and above what goes in one chunk of the smallest path.
COUNTS = [3, 4099]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(pools, world, dtype):
    pools(world).run(check_reductions, dtype)


def check_reductions(dtype):
    group, rank, world = here().group, here().rank, here().world
    for count in COUNTS:
        mine = [values(dtype, count, [count, r]) for r in range(world)]
        for op in OPS:
            if not allowed(op, dtype):
                continue
            what = f"{op} of {count} {dtype}"
            expected = reduced(op, mine)

            x = mine[rank].copy()
            work = group.all_reduce(x, op)
            assert work.done() and work.error() is None and work.name == "all_reduce"
            same(x, expected, f"all_reduce {what}")

            x = mine[rank].copy()
            group.all_reduce(x, op, async_op=True).wait()
            same(x, expected, f"async all_reduce {what}")

            for root in range(world):
                x = mine[rank].copy()
                group.reduce(x, root, op)
                same(x, expected if rank == root else mine[rank], f"reduce to {root} {what}")

            several = [[values(dtype, n, [n, r, 5]) for n in (count, 3, 0)] for r in range(world)]
            x = [part.copy() for part in several[rank]]
            group.all_reduce_coalesced(x, op)
            for i, part in enumerate(x):
                same(part, reduced(op, [several[r][i] for r in range(world)]), f"all_reduce_coalesced {what}")

            twice = [[values(dtype, count, [i, r, 6]) for i in range(2)] for r in range(world)]
            x = [part.copy() for part in twice[rank]]
            group.all_reduce_multi(x, op)
            if dtype not in ("float16", "float32", "complex64") or op in ("min", "max"):
                for part in x:
                    same(part, reduced(op, [part for row in twice for part in row]), f"all_reduce_multi {what}")
            same(x[0], x[1], f"all_reduce_multi {what}")

            whole = [values(dtype, count * world, [count, r, 7]) for r in range(world)]
            result = reduced(op, whole).reshape(world, count)
            out = np.empty(count, dtype)
            group.reduce_scatter_from(out, whole[rank], op)
            same(out, result[rank], f"reduce_scatter_from {what}")

            # Parts of different sizes: rank j gets j + 1 elements more.
            uneven = [[values(dtype, count + j, [j, r, 8]) for j in range(world)] for r in range(world)]
            out = np.empty(count + rank, dtype)
            group.reduce_scatter(out, uneven[rank], op)
            same(out, reduced(op, [uneven[r][rank] for r in range(world)]), f"reduce_scatter {what}")

            two = [values(dtype, 2 * world, [r, 9]) for r in range(world)]
            outs = [np.empty(count, dtype), np.empty(2, dtype)]
            group.reduce_scatter_coalesced(outs, [whole[rank], two[rank]], op)
            same(outs[0], result[rank], f"reduce_scatter_coalesced {what}")
            same(outs[1], reduced(op, two).reshape(world, 2)[rank], f"reduce_scatter_coalesced {what}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves(pools, world, dtype):
    pools(world).run(check_moves, dtype)


def check_moves(dtype):
    group, rank, world = here().group, here().rank, here().world
    for count in [0, *COUNTS]:
        mine = [values(dtype, count, [count, r, 1]) for r in range(world)]

        for root in range(world):
            x = mine[rank].copy()
            group.broadcast(x, root)
            np.testing.assert_array_equal(x, mine[root], f"broadcast {count}")

            x = [mine[rank].copy(), values(dtype, 5, [rank, 2])]
            group.broadcast_coalesced(x, root)
            np.testing.assert_array_equal(x[0], mine[root])
            np.testing.assert_array_equal(x[1], values(dtype, 5, [root, 2]))

            outs = [np.empty(count, dtype) for _ in range(world)] if rank == root else []
            group.gather(outs, mine[rank], root)
            for got, expected in zip(outs, mine, strict=False):
                np.testing.assert_array_equal(got, expected, f"gather {count}")

            out = np.empty(count, dtype)
            group.scatter(out, mine if rank == root else [], root)
            np.testing.assert_array_equal(out, mine[rank], f"scatter {count}")

        out = np.empty(count * world, dtype)
        group.all_gather_into(out, mine[rank])
        np.testing.assert_array_equal(out, np.concatenate(mine), f"all_gather_into {count}")

        # A matrix with one row for each rank is as good.
        out = np.empty((world, count), dtype)
        group.all_gather_into(out, mine[rank])
        np.testing.assert_array_equal(out, np.stack(mine))

        uneven = [values(dtype, count + r, [r, 3]) for r in range(world)]
        outs = [np.empty(count + r, dtype) for r in range(world)]
        group.all_gather(outs, uneven[rank])
        for got, expected in zip(outs, uneven, strict=True):
            np.testing.assert_array_equal(got, expected, f"all_gather {count}")

        outs = [np.empty(count * world, dtype), np.empty(2 * world, dtype)]
        group.all_gather_coalesced(outs, [mine[rank], values(dtype, 2, [rank, 4])])
        np.testing.assert_array_equal(outs[0], np.concatenate(mine))
        np.testing.assert_array_equal(outs[1], np.concatenate([values(dtype, 2, [r, 4]) for r in range(world)]))

        whole = [values(dtype, count * world, [r, 5]) for r in range(world)]
        out = np.empty(count * world, dtype)
        group.all_to_all_into(out, whole[rank])
        expected = np.concatenate([whole[r].reshape(world, count)[rank] for r in range(world)])
        np.testing.assert_array_equal(out, expected, f"all_to_all_into {count}")

        # From i to j: count + 2i + j elements.
        parts = [[values(dtype, count + 2 * i + j, [i, j, 6]) for j in range(world)] for i in range(world)]
        outs = [np.empty(count + 2 * i + rank, dtype) for i in range(world)]
        group.all_to_all(outs, parts[rank])
        for i, got in enumerate(outs):
            np.testing.assert_array_equal(got, parts[i][rank], f"all_to_all {count}")

        to, source = (rank + 1) % world, (rank - 1) % world
        out = np.empty(count, dtype)
        sent = group.send(mine[rank], to, async_op=True)
        group.recv(out, source)
        sent.wait()
        np.testing.assert_array_equal(out, mine[source], f"send {count}")


@pytest.mark.parametrize("world", WORLDS)
def test_large(pools, world):
    """Above every threshold between paths, and not a round number."""
    pools(world).run(check_large)


def check_large():
    group, rank, world = here().group, here().rank, here().world
    count = 3_000_001
    mine = [np.arange(r, count + r, dtype="int32") for r in range(world)]
    x = mine[rank].copy()
    group.all_reduce(x)
    np.testing.assert_array_equal(x, np.add.reduce(mine, dtype="int32"))
    out = np.empty(count * world, "int32")
    group.all_gather_into(out, mine[rank])
    np.testing.assert_array_equal(out, np.concatenate(mine))
    back = np.empty(count, "int32")
    group.reduce_scatter_from(back, out)
    np.testing.assert_array_equal(back, mine[rank] * np.int32(world))
    x = mine[rank].copy()
    group.broadcast(x, world - 1)
    np.testing.assert_array_equal(x, mine[-1])
    group.all_to_all_into(out, np.concatenate(mine))
    np.testing.assert_array_equal(out.reshape(world, count), np.stack([mine[rank]] * world))


@pytest.mark.parametrize("dtype", FLOATS)
def test_not_a_number_goes_through(pools, dtype):
    pools(2).run(check_nan, dtype)


def check_nan(dtype):
    group, rank = here().group, here().rank
    for op in ("sum", "product", "min", "max", "avg"):
        for who in (0, 1):
            x = np.array([1, np.nan if rank == who else 2, 3], dtype)
            group.all_reduce(x, op)
            assert np.isnan(x[1]) and not np.isnan(x[[0, 2]]).any(), (op, who, x)
    x = np.array([np.inf, -np.inf, np.inf], dtype)
    if rank == 1:
        x[2] = -np.inf
    group.all_reduce(x)
    assert x[0] == np.inf and x[1] == -np.inf and np.isnan(x[2])


def test_narrow_floats_are_rounded_once(pools):
    """2048 + 1 + 1 is 2048 if every step is rounded to float16, and 2050 if the end is."""
    pools(3).run(check_rounding)


def check_rounding():
    group, rank = here().group, here().rank
    x = np.full(5, 2048 if rank == 0 else 1, "float16")
    group.all_reduce(x)
    assert (x == 2050).all(), x
    x = np.full(5, 60000, "float16")
    group.all_reduce(x, "avg")
    assert (x == 60000).all(), x


def test_float_results_have_the_same_bits_on_all_ranks(pools):
    results = pools(3).run(float_bits)
    assert results[0] == results[1] == results[2]


def float_bits():
    group, rank = here().group, here().rank
    x = np.random.default_rng(rank).standard_normal(100_003).astype("float32")
    twin = x.copy()
    group.all_reduce(x)
    group.all_reduce(twin, async_op=True).wait()
    assert x.tobytes() == twin.tobytes()
    return x.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_without_a_meaning_are_refused_before_anything_is_changed(pools, dtype):
    pools(2).run(check_refused, dtype)


def check_refused(dtype):
    group = here().group
    x = values(dtype, 8, 1)
    before = x.copy()
    for op in OPS:
        if allowed(op, dtype):
            continue
        for call in (
            lambda op=op: group.all_reduce(x, op),
            lambda op=op: group.all_reduce(x, op, async_op=True).wait(),
            lambda op=op: group.all_reduce_coalesced([x], op),
            lambda op=op: group.reduce(x, 0, op),
            lambda op=op: group.reduce_scatter_from(x[:4], x, op),
        ):
            with pytest.raises(tensorwire.MisuseError, match=dtype):
                call()
    np.testing.assert_array_equal(x, before)
    # The group is as good as before.
    group.barrier()


def test_integers_wrap(pools):
    pools(2).run(check_wrap)


def check_wrap():
    group = here().group
    for dtype in INTEGERS:
        x = np.full(3, np.iinfo(dtype).max, dtype)
        group.all_reduce(x)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(x, np.full(3, np.iinfo(dtype).max, dtype) * np.array(2, dtype))


def test_premul_sum(pools):
    pools(2).run(check_premul)


def check_premul():
    group = here().group
    x = np.arange(5, dtype="float32")
    group.all_reduce(x, ("premul_sum", 3))  # an int is as good
    np.testing.assert_array_equal(x, np.arange(5) * 6)
    for wrong in ("premul_sum", "mean", "SUM", ""):
        with pytest.raises(tensorwire.MisuseError):
            group.all_reduce(x, wrong)
    for wrong in (None, 3, ("premul_sum",), ("premul_sum", "x"), ("sum", 2.0), ("premul_sum", 1, 2)):
        with pytest.raises((TypeError, tensorwire.MisuseError)):
            group.all_reduce(x, wrong)


def test_sizes_that_do_not_fit_are_refused(pools):
    pools(2).run(check_sizes)


def check_sizes():
    """Wrong on the face of it: refused on this rank without a word to the others."""
    group = here().group
    x, y = np.zeros(4, "f4"), np.zeros(7, "f4")
    for call in (
        lambda: group.all_gather_into(y, x),
        lambda: group.reduce_scatter_from(x, y),
        lambda: group.all_to_all_into(y, y.copy()),
        lambda: group.all_gather([x], x),
        lambda: group.all_gather([x, x, x], x),
        lambda: group.reduce_scatter(x, [x]),
        lambda: group.all_to_all([x, x], [x]),
        lambda: group.all_gather_coalesced([y], [x, x]),
        lambda: group.broadcast(x, 2),
        lambda: group.reduce(x, 17),
        lambda: group.gather([], x, 2),
        lambda: group.scatter(x, [], 2),
        lambda: group.send(x, 2),
        lambda: group.recv(x, 2),
        lambda: group.all_gather_into(np.zeros(8, "f8"), x),
    ):
        with pytest.raises(tensorwire.MisuseError):
            call()
    group.barrier()


def test_ranks_that_give_or_get_nothing_say_none(pools):
    pools(2).run(check_none)


def check_none():
    group, rank, world = here().group, here().rank, here().world
    for root in range(world):
        parts = [np.full(3, -1.0) for _ in range(world)] if rank == root else None
        group.gather(parts, np.full(3, float(rank)), root)
        assert parts is None or [part[0] for part in parts] == [0, 1]
        out = np.empty(3)
        group.scatter(out, parts, root, async_op=True).wait()
        assert (out == rank).all()
    # The root itself has to give them.
    for call in (lambda: group.gather(None, out, rank), lambda: group.scatter(out, None, rank)):
        with pytest.raises(tensorwire.MisuseError, match="needs a list of 2 tensors, not 0"):
            call()
    group.barrier()


def test_one_tensor_in_place_of_a_list_has_an_operation_of_its_own(pools):
    pools(2).run(check_one_for_list)


def check_one_for_list():
    group, x = here().group, np.zeros(4, "f4")
    whole = np.zeros(8, "f4")
    for whole in (np.zeros(8, "f4"), bytearray(32), memoryview(bytearray(32)).cast("f")):
        part = x if isinstance(whole, np.ndarray) else bytearray(16)
        for operation, hint, call in (
            ("all_gather", "all_gather_into", lambda: group.all_gather(whole, part)),
            ("all_gather_coalesced", "all_gather_into", lambda: group.all_gather_coalesced(whole, [part])),
            ("all_to_all", "all_to_all_into", lambda: group.all_to_all(whole, [part, part])),
            ("reduce_scatter_coalesced", "reduce_scatter_from", lambda: group.reduce_scatter_coalesced(whole, [part])),
            ("all_reduce_coalesced", "all_reduce", lambda: group.all_reduce_coalesced(whole)),
            ("gather", "numpy.split", lambda: group.gather(whole, part, 0)),
        ):
            with pytest.raises(tensorwire.MisuseError) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(f"{operation} needs a list of tensors and got one ") and hint in text, text
            assert type(whole).__name__ in text
    # Rows are a list of tensors, and the error of a list is that of its tensor.
    rows = np.zeros((2, 4), "f4")
    group.all_gather(rows, np.full(4, here().rank, "f4"))
    assert (rows == [[0], [1]]).all()
    with pytest.raises(tensorwire.MisuseError, match="int is not a tensor"):
        group.all_gather([1, 2], x)
    group.barrier()


def test_negative_ranks_are_refused(pools):
    pools(2).run(check_negative)


def check_negative():
    group, x = here().group, np.zeros(4, "f4")
    for call in (
        lambda: group.broadcast(x, -1),
        lambda: group.reduce(x, -1),
        lambda: group.send(x, -1),
        lambda: group.recv(x, -1),
        lambda: group.send(x, 0, -1),
        lambda: group.subgroup([-1, 0]),
    ):
        with pytest.raises((ValueError, OverflowError)):
            call()
    group.barrier()
