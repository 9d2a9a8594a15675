"""Tensors that do not lie plainly in memory: strided, reversed, broadcast, unaligned, of many dimensions."""

import numpy as np
import pytest
from ranks import here

import tensorwire


VIEWS = {
    "every second": lambda: np.zeros(40, "i4")[::2],
    "reversed": lambda: np.zeros(20, "i4")[::-1],
    "every third, reversed": lambda: np.zeros(60, "i4")[::-3],
    "transposed": lambda: np.zeros((6, 5), "i4").T,
    "column": lambda: np.zeros((20, 4), "i4")[:, 1],
    "block": lambda: np.zeros((8, 9), "i4")[2:6, 3:8],
    "fortran": lambda: np.zeros((4, 5, 6), "i4", order="F"),
    "reversed in one dimension": lambda: np.zeros((5, 6), "i4")[:, ::-1],
    "reversed in both, strided": lambda: np.zeros((10, 12), "i4")[::-2, ::-3],
    "three dimensions, mixed": lambda: np.zeros((4, 6, 8), "i4")[::-1, 1::2, :5].transpose(2, 0, 1),
    "sizes of one": lambda: np.zeros((1, 6, 1, 5), "i4").transpose(3, 2, 1, 0),
    "no dimension": lambda: np.zeros((), "i4"),
    "empty": lambda: np.zeros((3, 0, 2), "i4"),
    "empty, strided": lambda: np.zeros((3, 10), "i4")[::-1, 5:5],
    "eight dimensions": lambda: np.zeros((3,) * 8, "i4").transpose()[:, ::2],
    "64 dimensions": lambda: np.zeros((1,) * 61 + (2, 3, 2), "i4"),
    "64 dimensions, transposed": lambda: np.zeros((1,) * 61 + (2, 3, 2), "i4").T,
    "unaligned": lambda: np.zeros(4 * 20 + 1, "u1")[1:].view("i4"),
    "unaligned, strided": lambda: np.zeros(4 * 20 + 3, "u1")[3:].view("i4")[::2],
}


def numbered(view, start):
    """The view, filled so that every element is another one."""
    view[...] = np.arange(start, start + view.size, dtype="i4").reshape(view.shape)
    return view


def outside(view):
    """The memory around the view, with the view itself blanked out."""
    base = view
    while base.base is not None:
        base = base.base
    copy, inside = view.copy(), view
    inside[...] = -7
    around = base.copy()
    inside[...] = copy
    return around


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_and_written_in_place(pools, world, name):
    pools(world).run(check_view, name)


def check_view(name):
    group, rank, world, make = here().group, here().rank, here().world, VIEWS[name]
    count, shape = make().size, make().shape
    parts = [np.arange(100 * r, 100 * r + count, dtype="i4").reshape(shape) for r in range(world)]

    def mine():
        return numbered(make(), 100 * rank)

    def check(view, expected, what):
        np.testing.assert_array_equal(view, expected, what)
        np.testing.assert_array_equal(outside(view), outside(make()), f"{what} wrote beside its tensor")

    for how in ({}, {"async_op": True}):
        x = mine()
        group.all_reduce(x, **how).wait()
        check(x, sum(parts[1:], parts[0]), "all_reduce")

        x = mine()
        group.broadcast(x, world - 1, **how).wait()
        check(x, parts[-1], "broadcast")

        outs = [make() for _ in range(world)]
        group.all_gather(outs, mine(), **how).wait()
        for out, expected in zip(outs, parts, strict=True):
            check(out, expected, "all_gather")

        outs = [make() for _ in range(world)] if rank == 0 else []
        group.gather(outs, mine(), 0, **how).wait()
        for out, expected in zip(outs, parts, strict=False):
            check(out, expected, "gather")

        out = make()
        group.scatter(out, [numbered(make(), 100 * r) for r in range(world)] if rank == 0 else [], 0, **how).wait()
        check(out, parts[rank], "scatter")

        out = make()
        group.reduce_scatter(out, [mine() for _ in range(world)], **how).wait()
        check(out, sum(parts[1:], parts[0]), "reduce_scatter")

        outs = [make() for _ in range(world)]
        group.all_to_all(outs, [mine() for _ in range(world)], **how).wait()
        for out, expected in zip(outs, parts, strict=True):
            check(out, expected, "all_to_all")

        out = make()
        sent = group.send(mine(), (rank + 1) % world, 3, async_op=True)
        group.recv(out, (rank - 1) % world, 3, **how).wait()
        sent.wait()
        check(out, parts[rank - 1], "recv")


@pytest.mark.parametrize("name", ["every second", "reversed", "transposed"])
def test_views_as_the_large_side(pools, name):
    """The tensors that hold the parts of all ranks may be strided, too."""
    pools(2).run(check_large_side, name)


LARGE = {
    "every second": lambda: np.zeros(48, "i4")[::2],
    "reversed": lambda: np.zeros(24, "i4")[::-1],
    "transposed": lambda: np.zeros((6, 4), "i4").T,
}


def check_large_side(name):
    group, rank, world, make = here().group, here().rank, here().world, LARGE[name]
    small = [np.arange(50 * r, 50 * r + 12, dtype="i4") for r in range(world)]
    out = make()
    group.all_gather_into(out, small[rank])
    np.testing.assert_array_equal(out.ravel(), np.concatenate(small))

    whole = numbered(make(), rank)
    out = np.zeros(12, "i4")
    group.reduce_scatter_from(out, whole)
    sums = sum(np.arange(r, r + 24, dtype="i4") for r in range(world))
    np.testing.assert_array_equal(out, sums.reshape(2, 12)[rank])

    out = make()
    group.all_to_all_into(out, whole)
    expected = np.concatenate([np.arange(r, r + 24).reshape(2, 12)[rank] for r in range(world)])
    np.testing.assert_array_equal(out.ravel(), expected)


def test_broadcast_views_are_inputs_only(pools):
    pools(2).run(check_broadcast_views)


def check_broadcast_views():
    group, rank = here().group, here().rank
    wide = np.broadcast_to(np.array([rank + 1, 2], "i4"), (3, 2))
    outs = [np.zeros((3, 2), "i4") for _ in range(2)]
    group.all_gather(outs, wide)
    np.testing.assert_array_equal(outs[1], [[2, 2]] * 3)
    out = np.zeros(3, "i4")
    group.reduce_scatter_from(out, np.broadcast_to(np.array(rank + 1, "i4"), 6))
    np.testing.assert_array_equal(out, [3, 3, 3])
    x = np.broadcast_to(np.array(5, "i4"), 4) if rank == 0 else np.zeros(4, "i4")
    group.broadcast(x, 0)
    np.testing.assert_array_equal(x, [5] * 4)

    # Writable, but several elements are one; and windows that overlap.
    once = np.zeros(4, "i4")
    for overlapping in (
        np.lib.stride_tricks.as_strided(once, (3,), (0,)),
        np.lib.stride_tricks.as_strided(once, (3, 2), (4, 4)),
        np.lib.stride_tricks.as_strided(once[1:], (2, 2), (4, -4)),
    ):
        for call in (
            lambda x=overlapping: group.all_reduce(x),
            lambda x=overlapping: group.all_reduce(x, async_op=True).wait(),
            lambda x=overlapping: group.broadcast(x, 1 - rank),
            lambda x=overlapping: group.recv(x, 1 - rank),
            lambda x=overlapping: group.recv_any(x),
        ):
            with pytest.raises(tensorwire.MisuseError):
                call()
    assert not once.any()
    group.barrier()


def test_more_dimensions_than_a_layout_has_are_refused_by_name(pools):
    pools(1).run(check_many_dimensions)


def check_many_dimensions():
    group = here().group
    # No two dimensions of it can be seen as one.
    x = np.zeros((3,) * 10, "u1")[(slice(None, None, 2),) * 10]
    try:
        group.all_reduce(x)
    except tensorwire.MisuseError as error:
        assert "dimensions" in str(error)
    # Without gaps, any number will do.
    group.all_reduce(np.ones((1,) * 54 + (2,) * 10, "u1"))


def test_aliases(pools):
    pools(2).run(check_aliases)


def check_aliases():
    """The input may lie where the output will, as in torch's in-place forms."""
    group, rank = here().group, here().rank
    whole = np.zeros(8, "i4")
    whole[4 * rank : 4 * rank + 4] = rank + 1
    group.all_gather_into(whole, whole[4 * rank : 4 * rank + 4])
    np.testing.assert_array_equal(whole, [1] * 4 + [2] * 4)
    whole = np.arange(8, dtype="i4")
    group.reduce_scatter_from(whole[4 * rank : 4 * rank + 4], whole)
    np.testing.assert_array_equal(whole[4 * rank : 4 * rank + 4], 2 * np.arange(8)[4 * rank : 4 * rank + 4])


def test_a_large_strided_tensor(pools):
    pools(2).run(check_large_strided)


def check_large_strided():
    group, rank = here().group, here().rank
    x = np.zeros((1000, 1501), "i4")
    view = x.T[::-1, ::2]
    view[...] = np.arange(view.size, dtype="i4").reshape(view.shape) * (rank + 1)
    group.all_reduce(view)
    np.testing.assert_array_equal(view.ravel(), 3 * np.arange(view.size, dtype="i4"))
    assert not x[1::2].any()
