"""How groups are made, named, split and closed, and what they say about themselves."""

import datetime
import os
import socket
import threading

import numpy as np
import pytest
from ranks import here

import tensorwire
from tensorwire import _native


def alone(**keywords):
    return _native.Group.from_store(tensorwire.MemoryStore(), 0, 1, **keywords)


def test_properties(pools):
    pools(2).run(check_properties)


def check_properties():
    group = here().fresh("named", timeout=12.5)
    assert (group.rank, group.world, group.name) == (here().rank, 2, "named")
    assert group.timeout == datetime.timedelta(seconds=12.5)
    group.set_timeout(7)
    assert group.timeout == datetime.timedelta(seconds=7)
    group.set_timeout(datetime.timedelta(milliseconds=1500))
    assert group.timeout == datetime.timedelta(seconds=1.5)
    for wrong in (-1, float("nan"), datetime.timedelta(seconds=-1), "1", None):
        with pytest.raises((ValueError, TypeError)):
            group.set_timeout(wrong)
    group.set_timeout(60)
    members = group.members
    assert [member.rank for member in members] == [0, 1]
    own = members[here().rank]
    assert (own.pid, own.host) == (os.getpid(), socket.gethostname())
    assert str(own) == f"rank {own.rank} (host {own.host}, pid {own.pid})" and str(own) in repr(own)
    assert own == group.members[here().rank] and hash(own) == hash(group.members[here().rank])
    assert members[0] != members[1] and members[0].identity != members[1].identity and len(own.identity) == 32
    assert group.hosts == [[0, 1]]
    assert group.check() is None
    text = group.explain()
    assert isinstance(text, str) and "rank" in text
    assert "named" in repr(group) and f"rank {here().rank} of 2" in repr(group)
    for name in ("rank", "world", "name", "timeout", "sequence", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(group, name, 1)
    with pytest.raises(TypeError):
        _native.Group()


def test_sequence_counts_operations(pools):
    pools(2).run(check_sequence)


def check_sequence():
    group, rank = here().fresh(), here().rank
    assert group.sequence == 0
    group.barrier()
    assert group.sequence == 1
    group.all_reduce(np.zeros(3))
    group.all_reduce(np.zeros(3), async_op=True).wait()
    assert group.sequence == 3
    if rank == 0:
        group.send(np.zeros(1), 1)
    else:
        group.recv(np.zeros(1), 0)
    group.barrier(async_op=True).wait()
    assert group.sequence == 5
    with pytest.raises(tensorwire.MisuseError):
        group.all_reduce(b"read-only")
    assert group.sequence == 5, "nothing was started"


@pytest.mark.parametrize("timeout", [0, 0.5, 1e6, 1e12, 1e19, datetime.timedelta.max, datetime.timedelta(days=1)])
def test_time_outs_of_all_sizes(timeout):
    group = alone(timeout=30)
    try:
        group.barrier(timeout=timeout)
        group.all_reduce(np.zeros(3), timeout=timeout)
        group.set_timeout(timeout)
        assert group.timeout >= datetime.timedelta(0)
    except tensorwire.TimeoutError:
        assert timeout == 0
    except tensorwire.MisuseError:
        assert timeout == 1e19


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "5", [], datetime.timedelta(days=-1)])
def test_time_outs_that_are_none(timeout):
    group = alone()
    with pytest.raises((ValueError, TypeError)):
        group.barrier(timeout=timeout)
    with pytest.raises((ValueError, TypeError)):
        alone(timeout=timeout)
    with pytest.raises((ValueError, TypeError)):
        group.all_reduce(np.zeros(1), async_op=True).wait(timeout) or group.send(
            np.zeros(1), 0, async_op=True
        ).wait(timeout)


def test_an_infinite_time_out_is_refused_or_kept():
    try:
        alone(timeout=float("inf")).barrier()
    except tensorwire.MisuseError as error:
        assert "inf" in str(error)


@pytest.mark.parametrize("rank, world", [(0, 0), (1, 1), (5, 2), (-1, 2), (0, -1), (None, 1), (0, None), ("0", 1)])
def test_places_that_are_none(rank, world):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _native.Group.from_store(tensorwire.MemoryStore(), rank, world, timeout=1)


def test_stores_that_are_none():
    for wrong in (None, 3, "store", object()):
        with pytest.raises((TypeError, ValueError, tensorwire.TensorwireError)):
            _native.Group.from_store(wrong, 0, 1, timeout=1)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "tcp://", "tcp://localhost", "tcp://localhost:none", "file://", "http://localhost:1", "\0"]
)
def test_urls_that_are_none(url):
    with pytest.raises((ValueError, tensorwire.TensorwireError)):
        _native.Group.from_url(url, rank=0, world=1, timeout=1)


def test_from_url(tmp_path):
    group = _native.Group.from_url(f"file://{tmp_path}/store", rank=0, world=1, timeout=30)
    group.barrier()
    group.close()
    with tensorwire.TcpServer("127.0.0.1") as server:
        group = _native.Group.from_url(f"tcp://127.0.0.1:{free_port()}", rank=0, world=1, timeout=30)
        group.barrier()
        group.close()
        del server
    with pytest.raises(tensorwire.MisuseError):
        _native.Group.from_url(f"file://{tmp_path}/store", timeout=1)


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_from_url_of_two(pools):
    port = free_port()
    pools(2).run(check_url, f"tcp://127.0.0.1:{port}")


def check_url(url):
    group = _native.Group.from_url(url, rank=here().rank, world=2, timeout=60)
    x = np.ones(3)
    group.all_reduce(x)
    assert (x == 2).all()
    group.barrier()
    group.close()


def test_from_env(pools):
    pools(2).run(check_env, free_port())


def check_env(port):
    wanted = {
        "RANK": here().rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": here().rank,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in wanted.items()})
    try:
        group = _native.Group.from_env(name="env", timeout=60)
        assert (group.rank, group.world) == (here().rank, 2)
        group.barrier()
        group.close()
    finally:
        for key in wanted:
            del os.environ[key]


def test_from_env_without_a_launcher(monkeypatch):
    for key in list(os.environ):
        if key in ("RANK", "WORLD_SIZE") or key.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_", "TENSORWIRE_")):
            monkeypatch.delenv(key)
    with pytest.raises(tensorwire.MisuseError, match="RANK"):
        _native.Group.from_env(timeout=1)


def test_subgroups(pools):
    pools(3).run(check_subgroups)


def check_subgroups():
    group, rank = here().group, here().rank
    turned = group.subgroup([2, 0, 1])
    assert turned.rank == [2, 0, 1].index(rank) and turned.world == 3
    outs = [np.zeros(1, "i4") for _ in range(3)]
    turned.all_gather(outs, np.array([rank], "i4"))
    assert [int(out[0]) for out in outs] == [2, 0, 1]
    if rank != 1:
        pair = group.subgroup([2, 0])
        assert pair.world == 2
        x = np.array([rank + 1])
        pair.all_reduce(x)
        assert x[0] == 4
        pair.close()
    own = group.subgroup([rank])
    assert (own.rank, own.world) == (0, 1)
    own.barrier()
    own.close()
    turned.close()
    for wrong in ([], [0, 0, rank], [3, rank], [r for r in range(3) if r != rank]):
        with pytest.raises(tensorwire.MisuseError):
            group.subgroup(wrong)
    group.barrier()


def test_a_subgroup_of_a_subgroup(pools):
    pools(3).run(check_nested)


def check_nested():
    group, rank = here().group, here().rank
    first = group.subgroup([2, 1, 0])
    second = first.subgroup([1, 2]) if rank in (1, 0) else None
    if second:
        assert second.rank == {1: 0, 0: 1}[rank]
        x = np.array([rank])
        second.broadcast(x, 0)
        assert x[0] == 1
        first.close()
        second.barrier()  # it needs its parent no more
        second.close()
    group.barrier()


def test_split(pools):
    pools(3).run(check_split)


def check_split():
    group, rank = here().group, here().rank
    part = group.split(rank % 2, -rank)
    assert part.world == (2 if rank != 1 else 1)
    assert part.rank == {0: 1, 1: 0, 2: 0}[rank]  # by key
    x = np.array([rank])
    part.all_reduce(x)
    assert x[0] == (2 if rank != 1 else 1)
    assert group.split(None) is None if rank == 1 else group.split(0).world == 2
    # All alike.
    assert group.split(5).world == 3
    assert group.split(None) is None
    with pytest.raises((TypeError, OverflowError, ValueError)):
        group.split(-1)
    group.barrier()


def test_closed(pools):
    pools(2).run(check_closed)


def check_closed():
    group, rank = here().fresh(), here().rank
    group.barrier()
    group.close()
    group.close()  # again is nothing
    x = np.zeros(2)
    assert group.rank == rank and group.world == 2 and "rank" in repr(group)
    for call in (
        group.barrier,
        lambda: group.barrier(async_op=True),
        lambda: group.all_reduce(x),
        lambda: group.all_reduce(x, async_op=True),
        lambda: group.send(x, 0),
        lambda: group.recv(x, 0),
        lambda: group.recv_any(x),
        lambda: group.subgroup([rank]),
        lambda: group.split(0),
        group.shrink,
        group.check,
        group.explain,
        lambda: group.members,
        lambda: group.hosts,
        group.abort,
    ):
        with pytest.raises(tensorwire.MisuseError, match="closed"):
            call()


def test_names_are_used_once(pools):
    pools(2).run(check_names)


def check_names():
    """A group of the same name after the first was closed is a new one, or an error that says so; it never hangs."""
    group, rank = here().group, here().rank
    first = here().fresh("twice", timeout=30)
    first.barrier()
    first.close()
    group.barrier()
    try:
        second = here().fresh("twice", timeout=5)
    except tensorwire.TensorwireError as error:
        assert "twice" in str(error) or "store" in str(error), error
    else:
        second.barrier()
        second.close()
    group.barrier()
    assert rank in (0, 1)


def test_two_ranks_in_one_process_are_refused():
    """At once, on both, and not by a time-out."""
    store, errors = tensorwire.MemoryStore(), []

    def rank(number):
        try:
            _native.Group.from_store(store, number, 2, timeout=60)
        except tensorwire.PeerError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 2 and all("one process" in error for error in errors), errors
