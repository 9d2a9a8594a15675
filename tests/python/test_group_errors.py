"""Each class of errors, made for real: kills, stops, mismatches, time-outs, aborts, ranks that leave."""

import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from ranks import PATIENCE, Ranks, here

import tensorwire

#: Far above what is promised; only there against hanging.
SOON = 50


def caught(call, *kinds):
    """The error that a call raises, and how long that took."""
    start = time.monotonic()
    try:
        call()
    except kinds or tensorwire.TensorwireError as error:
        return {
            "class": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "ranks": getattr(error, "ranks", None),
            "kind": getattr(error, "kind", None),
            "seconds": time.monotonic() - start,
        }
    raise AssertionError("it raised nothing")


# A rank that is killed

CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.zeros(10)),
    "all_reduce, started": lambda group: group.all_reduce(np.zeros(10), async_op=True).wait(),
    "barrier": lambda group: group.barrier(),
    "recv": lambda group: group.recv(np.zeros(10), 2),
    "recv_any": lambda group: group.recv_any(np.zeros(10)),
}


def test_a_killed_rank_is_named():
    with Ranks(3) as ranks:
        ranks.run(make_groups, len(CALLS))
        ranks[0].start(wait_for_death, list(CALLS))
        ranks[1].start(wait_for_death, list(CALLS))
        time.sleep(0.5)
        pid = ranks[2].pid
        ranks[2].kill()
        for rank in (0, 1):
            for name, error in ranks[rank].result().items():
                assert error["class"] == "PeerDiedError", (name, error)
                assert error["kind"] == "died" and error["rank"] == 2, (name, error)
                assert "rank 2" in error["text"] and f"pid {pid}" in error["text"], (name, error)
                assert socket.gethostname() in error["text"], (name, error)
                assert error["seconds"] < SOON, (name, error)
        for rank in (0, 1):
            ranks[rank].start(after_death)
        for rank in (0, 1):
            assert ranks[rank].result() == [2, rank]


groups = []


def make_groups(count):
    groups[:] = [here().fresh() for _ in range(count)]
    for group in groups:
        group.barrier()


def wait_for_death(names):
    """Every call in a thread and a group of its own, all waiting when the rank is killed."""
    import threading

    errors = {}

    def one(name, group):
        errors[name] = caught(lambda: CALLS[name](group))

    threads = [threading.Thread(target=one, args=pair) for pair in zip(names, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def after_death():
    for group in groups:
        error = caught(group.check)
        assert error["class"] == "PeerDiedError" and error["rank"] == 2
        error = caught(lambda group=group: group.all_reduce(np.zeros(1)))
        assert error["class"] == "PeerDiedError" and error["rank"] == 2
        work = None
        try:
            work = group.all_reduce(np.zeros(1), async_op=True)
        except tensorwire.PeerDiedError:
            pass
        if work is not None:
            assert caught(lambda work=work: work.wait(SOON))["rank"] == 2
            assert isinstance(work.error(), tensorwire.PeerDiedError) and work.done()
            assert "failed" in repr(work)
    small = groups[0].shrink()
    x = np.array([1 + small.rank])
    small.all_reduce(x)
    assert x[0] == 3
    small.barrier()
    place = [small.world, small.rank]
    for group in [*groups, small]:
        group.close()
    return place


def test_a_rank_that_exits_without_closing():
    with Ranks(2) as ranks:
        ranks.run(make_groups, 1)
        ranks[0].start(wait_for_death, ["all_reduce"])
        ranks[1].start(leave_at_once)
        error = ranks[0].result()["all_reduce"]
        assert error["class"] == "PeerDiedError" and error["rank"] == 1
        assert ranks[1].exit_code() == 7


def leave_at_once():
    import os

    os._exit(7)


# How a rank ended: by processes that really end so

SCRIPT = """
import multiprocessing, os, signal, sys
import numpy as np
import tensorwire

url, rank = sys.argv[1], int(sys.argv[2])


def main():
    group = {make}(url, rank=rank, world=2, timeout=100)
    group.barrier()
    if rank == 1:
        end(group)
        return
    try:
        group.all_reduce(np.ones(3))
    except tensorwire.PeerDiedError as error:
        print(error.kind, error.rank, "|", error)


def end(group):
    {end}


{start}
"""
DIRECTLY = "main()"
BY_MULTIPROCESSING = """
process = multiprocessing.get_context("fork").Process(target=main)
process.start()
process.join()
"""
RAISE = "raise ValueError('boom' + chr(10) + 'and more')"
ENDS = {
    "raises": (RAISE, DIRECTLY, "left", "raised ValueError: boom"),
    "raises nothing to read": ("raise KeyError()", DIRECTLY, "left", "raised KeyError"),
    "raises, and closes": (f"try: {RAISE}\n    finally: group.close()", DIRECTLY, "left", "raised ValueError: boom"),
    "raises in multiprocessing": (RAISE, BY_MULTIPROCESSING, "died", "raised ValueError: boom"),
    "exits": ("os._exit(3)", DIRECTLY, "died", "exited with 3 after barrier #1"),
    "exits in multiprocessing": ("sys.exit(3)", BY_MULTIPROCESSING, "died", "exited with 3 after barrier #1"),
    "exits well": ("os._exit(0)", DIRECTLY, "left", "left: its process exited with 0 without closing the group"),
    "exits with a group of its own": ("sys.exit(3)", DIRECTLY, "left", "exited with 3 after barrier #1"),
    "is done": ("sys.exit()", DIRECTLY, "left", "left: it has closed the group"),
    "is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)", DIRECTLY, "died", "was killed by SIGKILL after barrier #1",
    ),
    "is asked to end": (
        "os.kill(os.getpid(), signal.SIGTERM); signal.pause()", DIRECTLY, "died", "was killed by SIGTERM after barrier #1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_others_read_how_a_rank_ended(tmp_path, name):
    import subprocess
    import sys

    end, start, kind, did = ENDS[name]
    make = "tensorwire.Group.from_url" if "of its own" in name else "tensorwire.init"
    code = SCRIPT.format(end=end, start=start, make=make)
    command = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    with subprocess.Popen([*command, "1"], stderr=subprocess.DEVNULL) as other:
        text = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=150, check=False).stdout
        other.wait(100)
    assert text.startswith(f"{kind} 1 | rank 1 (host {socket.gethostname()}, pid "), text
    assert f") {did}" in text and "and more" not in text, text


def test_the_rank_that_slept_reads_what_it_did():
    with Ranks(2) as ranks:
        ranks.run(make_groups, 1)
        ranks[0].start(give_up)
        assert ranks[0].exit_code() == 5
        error = ranks[1].call(come_late)
        assert error["class"] == "PeerDiedError" and error["rank"] == 0, error
        assert "ended after all_reduce #2 timed out waiting for you: it exited with 5" in error["text"], error


def give_up():
    import os

    error = caught(lambda: groups[0].all_reduce(np.ones(4), timeout=0.2))
    os._exit(5 if error["class"] == "TimeoutError" else 6)


def come_late():
    return caught(lambda: groups[0].all_reduce(np.ones(4)))


# A rank that is stopped


def test_a_stopped_rank_is_named_by_the_time_out():
    with Ranks(2) as ranks:
        ranks.run(make_groups, 2)
        ranks[1].kill(signal.SIGSTOP)
        time.sleep(0.2)
        errors = ranks[0].call(wait_for_stopped)
        for error in errors:
            assert error["class"] in ("TimeoutError", "PeerError"), error
            assert "rank 1" in error["text"], error
            assert error["seconds"] < SOON, error
        assert errors[0]["class"] == "TimeoutError", errors[0]
        assert ", which is stopped (SIGSTOP) after barrier #1, done " in errors[0]["text"], errors[0]
        assert errors[0]["text"].endswith("; the time-out was given with the call"), errors[0]
        assert errors[0]["rank"] == 1 and errors[0]["ranks"] == [1], errors[0]
        ranks[1].kill(signal.SIGCONT)


def wait_for_stopped():
    return [
        caught(lambda: groups[0].all_reduce(np.zeros(10), timeout=0.5)),
        caught(lambda: groups[1].barrier(timeout=0.5)),
    ]


# Time-outs


def test_time_outs_name_the_rank_that_is_missing(pools):
    pools(2).run(check_missing)


def check_missing():
    rank = here().rank
    own = here().group
    for name, call in {
        "all_reduce": lambda group: group.all_reduce(np.zeros(10), timeout=0.3),
        "barrier": lambda group: group.barrier(timeout=0.3),
        "recv": lambda group: group.recv(np.zeros(10), 1, timeout=0.3),
        "broadcast": lambda group: group.broadcast(np.zeros(10), 1, timeout=0.3),
        "started": lambda group: group.all_reduce(np.zeros(10), timeout=0.3, async_op=True).wait(),
        "recv_any": lambda group: group.recv_any(np.zeros(10), timeout=0.3),
    }.items():
        group = here().fresh()
        if rank == 0:
            error = caught(lambda group=group, call=call: call(group))
            assert error["class"] == "TimeoutError", (name, error)
            assert 0.25 < error["seconds"] < SOON, (name, error)
            if name != "recv_any":
                assert "rank 1" in error["text"], (name, error)
                assert error["rank"] == 1 and error["ranks"] == [1], (name, error)
                assert ", which " in error["text"], (name, error)
            else:
                assert error["rank"] is None and error["ranks"] == [], (name, error)
        own.barrier()
        group.close()


def test_the_time_out_of_the_group_counts_where_none_is_given(pools):
    pools(2).run(check_group_timeout)


def check_group_timeout():
    group = here().fresh()
    if here().rank == 0:
        group.set_timeout(0.3)
        error = caught(group.barrier)
        assert error["class"] == "TimeoutError" and 0.25 < error["seconds"] < SOON, error
        assert error["text"].endswith("the time-out is that of the group (its timeout, or TENSORWIRE_TIMEOUT)"), error
        error = caught(lambda: group.recv(np.zeros(1), 1))
        assert error["text"].endswith("the time-out is that of the group (its timeout, or TENSORWIRE_TIMEOUT)"), error
    here().group.barrier()
    group.close()


def test_time_outs_are_also_builtin_ones(pools):
    pools(2).run(check_builtin)


def check_builtin():
    group = here().fresh()
    if here().rank == 0:
        with pytest.raises(TimeoutError):
            group.recv(np.zeros(1), 1, timeout=0.1)
    here().group.barrier()
    group.close()


def test_a_message_that_timed_out_can_be_received_later(pools):
    pools(2).run(check_late_message)


def check_late_message():
    group, own, rank = here().fresh(), here().group, here().rank
    x = np.zeros(3)
    if rank == 0:
        assert caught(lambda: group.recv(x, 1, timeout=0.2))["class"] == "TimeoutError"
        assert caught(lambda: group.recv_any(x, timeout=0.2))["class"] == "TimeoutError"
        own.barrier()
        group.recv(x, 1)
        assert (x == 4).all()
    else:
        own.barrier()
        group.send(np.full(3, 4.0), 0)
    group.check()
    group.barrier()
    group.close()


def test_only_the_wait_runs_out(pools):
    pools(2).run(check_wait_timeout)


def check_wait_timeout():
    group, own, rank = here().fresh(), here().group, here().rank
    x = np.full(10, 1.0)
    if rank == 0:
        work = group.all_reduce(x, async_op=True)
        for timeout in (0, 0.1):
            assert caught(lambda t=timeout: work.wait(t))["class"] == "TimeoutError"
        assert not work.done() and work.error() is None
        own.barrier()
        work.wait(60)
        work.wait(0)
        work.wait()
        assert work.done() and work.error() is None
    else:
        own.barrier()
        group.all_reduce(x)
    assert (x == 2).all()
    group.close()


# Mismatches

MISMATCHES = {
    "operation": (lambda g: g.all_reduce(np.zeros(4)), lambda g: g.broadcast(np.zeros(4), 0), ["reduce", "broadcast"]),
    "type": (lambda g: g.all_reduce(np.zeros(4, "f4")), lambda g: g.all_reduce(np.zeros(4, "i4")), ["float", "int32"]),
    "size": (lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(5)), ["4", "5"]),
    "op": (lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(4), "max"), ["SUM", "MAX"]),
    "root": (lambda g: g.broadcast(np.zeros(4), 0), lambda g: g.broadcast(np.zeros(4), 1), ["0", "1"]),
    "barrier": (lambda g: g.barrier(), lambda g: g.all_reduce(np.zeros(4)), ["barrier", "all_reduce"]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_names_both_sides(pools, name):
    pools(2).run(check_mismatch, name)


def check_mismatch(name):
    group, rank = here().fresh(timeout=20), here().rank
    mine, words = MISMATCHES[name][rank], MISMATCHES[name][2]
    error = caught(lambda: (mine(group), group.barrier()))
    assert error["class"] == "MismatchError" and error["kind"] == "mismatch", error
    # One against one: nobody can tell who is wrong.
    assert error["rank"] is None and error["ranks"] == []
    assert "rank 0" in error["text"] and "rank 1" in error["text"], error
    for word in words:
        assert word.lower() in error["text"].lower(), error
    here().group.barrier()


@pytest.mark.parametrize("world", [4, 8])
def test_a_mismatch_blames_the_minority(pools, world):
    pools(world).run(check_minority)


def check_minority():
    group, rank = here().fresh(), here().rank
    count = 999 if rank else 1000
    error = caught(lambda: (group.all_reduce(np.zeros(count, "f4")), group.barrier()))
    assert error["class"] == "MismatchError" and error["rank"] == 0 and error["ranks"] == [0], error
    most = "ranks 1, 2, 3" if here().world == 4 else "ranks 1-7"
    assert f"in all_reduce #1, {most}: 999 float32; rank 0: 1000 float32; " in error["text"], error
    assert error["text"].startswith("rank 0 (host "), error
    own = f'; this rank, {rank} of group "{group.name}", called all_reduce of {count} float32 (SUM)'
    assert error["text"].endswith(own), error
    # It was told, and closing does not tell it again.
    group.close()
    here().group.barrier()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_closing_tells_a_mismatch_of_the_last_collective(pools, world):
    pools(world).run(check_mismatch_at_close)


def check_mismatch_at_close():
    group, rank = here().fresh(), here().rank
    # As root, each rank needs nobody.
    group.broadcast(np.full(3, rank), rank)
    here().group.barrier()
    error = caught(group.close)
    assert error["class"] == "MismatchError" and error["rank"] is None and error["ranks"] == [], error
    assert "in broadcast #1, rank 0: from rank 0; rank 1: from rank 1" in error["text"], error
    assert error["text"].endswith(f"called broadcast of 3 int64 from rank {rank}"), error
    group.close()
    with pytest.raises(tensorwire.MisuseError, match="closed"):
        group.barrier()
    # Where all called the same, closing tells nothing.
    group = here().fresh()
    group.broadcast(np.full(3, rank), 1)
    group.close()
    here().group.barrier()


def test_a_group_that_is_dropped_logs_a_mismatch():
    with Ranks(2) as ranks:
        ranks.run(drop_after_mismatch)
        for rank in (0, 1):
            output = ranks[rank].output()
            assert "ERROR" in output and "called different things: in broadcast #1, rank 0: from rank 0" in output


def drop_after_mismatch():
    group, rank = here().fresh(), here().rank
    group.broadcast(np.full(3, rank), rank)
    here().group.barrier()
    del group


AT_THE_END = """
import sys, tensorwire
rank, folder = int(sys.argv[1]), sys.argv[2]
group = tensorwire.init(f"file://{folder}/store", rank=rank, world=2)
other = tensorwire.Group.from_url(f"file://{folder}/other", rank=rank, world=2)
group.broadcast(bytearray([rank]), rank)
other.barrier()
"""


def test_a_mismatch_is_told_at_the_end_of_the_process(tmp_path):
    command = [sys.executable, "-c", AT_THE_END]
    ends = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for rank, end in enumerate(ends):
        errors = end.communicate(timeout=PATIENCE)[1]
        assert "tensorwire: the default group was closed at the end of the process: rank 0 (host " in errors, errors
        assert f"called broadcast of 1 uint8 from rank {rank}" in errors and "Traceback" not in errors, errors


def test_a_mismatch_is_found_in_started_works(pools):
    pools(2).run(check_started_mismatch)


def check_started_mismatch():
    group, rank = here().fresh(timeout=20), here().rank
    work = group.all_reduce(np.zeros(4 + rank), async_op=True)
    error = caught(lambda: (work.wait(), group.barrier()))
    assert error["class"] == "MismatchError"
    here().group.barrier()


# Aborts and leaving


def test_abort_reaches_all(pools):
    pools(3).run(check_abort)


def check_abort():
    group, rank = here().fresh(), here().rank
    pending = group.recv(np.zeros(1), (rank + 1) % 3, async_op=True)
    group.barrier()
    if rank == 1:
        group.abort("the oven is on fire")
    else:
        error = caught(lambda: group.all_reduce(np.zeros(10)))
        assert error["class"] == "AbortedError" and "the oven is on fire" in error["text"], error
    for call in (pending.wait, group.check, group.barrier, lambda: group.recv_any(np.zeros(1))):
        error = caught(call)
        assert error["class"] == "AbortedError" and "the oven is on fire" in error["text"], error
    group.abort("again")
    group.close()
    here().group.barrier()


def test_a_rank_that_closed_while_it_is_needed(pools):
    pools(2).run(check_left)


def check_left():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 1:
        group.close()
    else:
        error = caught(lambda: group.all_reduce(np.zeros(10)))
        assert error["class"] == "PeerDiedError" and error["kind"] == "left" and error["rank"] == 1, error
        assert "rank 1" in error["text"]
        error = caught(lambda: group.recv(np.zeros(10), 1))
        assert error["class"] == "PeerDiedError" and error["kind"] == "left" and error["rank"] == 1, error
    own.barrier()
    group.close()


def test_what_was_sent_before_leaving_arrives(pools):
    pools(2).run(check_last_words)


def check_last_words():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 1:
        group.send(np.array([5, 6]), 0)
        group.close()
        own.barrier()
    else:
        own.barrier()
        x = np.zeros(2, "i8")
        group.recv(x, 1)
        assert x.tolist() == [5, 6]


def test_pending_works_of_a_closed_group_end(pools):
    pools(2).run(check_pending)


def check_pending():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 0:
        works = [group.recv(np.zeros(4), 1, async_op=True), group.recv_any(np.zeros(4), 3, async_op=True)]
        own.barrier()
        group.close()
        for work in works:
            error = caught(lambda work=work: work.wait(SOON))
            assert error["class"] != "TimeoutError", error
            assert work.done() and work.error() is not None
    else:
        own.barrier()
    own.barrier()
    group.close()


def test_a_thread_in_a_call_when_the_group_is_closed(pools):
    pools(2).run(check_close_during_call)


def check_close_during_call():
    import threading

    group, own, rank = here().fresh(), here().group, here().rank
    errors = []
    if rank == 0:
        thread = threading.Thread(target=lambda: errors.append(caught(lambda: group.recv(np.zeros(4), 1))))
        thread.start()
        time.sleep(0.3)
        group.close()
        thread.join(5)
        ended = not thread.is_alive()
    own.barrier()
    group.close()
    if rank == 0:
        assert ended and "closed" in errors[0]["text"], errors


def test_a_group_goes_on_after_a_time_out(pools):
    """Every rank is told at its own call of the operation that timed out; the next one is as good as new."""
    pools(2).run(check_after_timeout)


def check_after_timeout():
    group, own, rank = here().fresh(timeout=30), here().group, here().rank
    if rank == 1:
        own.barrier()
    error = caught(lambda: group.all_reduce(np.full(10, 1.0), timeout=0.3 if rank == 0 else 30))
    assert error["class"] == "TimeoutError" and "rank 1" in error["text"], error
    if rank == 0:
        own.barrier()
    group.check()
    x = np.full(10, 1.0)
    group.all_reduce(x)
    assert (x == 2).all()
    own.barrier()
    group.close()


# The tree


def test_the_tree():
    errors = tensorwire
    assert issubclass(errors.TensorwireError, RuntimeError)
    assert issubclass(errors.TimeoutError, (errors.TensorwireError, TimeoutError))
    assert issubclass(errors.PeerError, errors.TensorwireError)
    assert issubclass(errors.PeerDiedError, errors.PeerError)
    assert issubclass(errors.MismatchError, errors.PeerError)
    assert issubclass(errors.AbortedError, errors.TensorwireError)
    assert issubclass(errors.MisuseError, errors.TensorwireError) and issubclass(errors.MisuseError, ValueError)
    assert issubclass(errors.UnsupportedError, errors.TensorwireError)
    import copy
    import pickle

    error = errors.TimeoutError("too late", [2, 3])
    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), str(twin), twin.ranks, twin.rank) == (type(error), "too late", [2, 3], 2)
    assert errors.TimeoutError("too late").rank is None
    error = errors.PeerDiedError("rank 3 died", "died", 3)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), str(twin), twin.kind, twin.rank) == (type(error), "rank 3 died", "died", 3)


def test_a_rank_that_never_comes_is_named(tmp_path):
    from tensorwire import _native

    store = tensorwire.FileStore(str(tmp_path / "store"))
    error = caught(lambda: _native.Group.from_store(store, 0, 3, timeout=0.3))
    assert error["class"] == "TimeoutError" and error["seconds"] < SOON
    assert "1" in error["text"] and "2" in error["text"], error


def test_a_store_that_is_not_there():
    from tensorwire import _native

    error = caught(lambda: _native.Group.from_url("tcp://127.0.0.1:9", rank=1, world=2, timeout=0.3))
    assert error["seconds"] < SOON and "127.0.0.1" in error["text"], error


def test_two_ranks_of_one_number(tmp_path):
    """A rank that is already there is refused, or both find out; neither hangs beyond its time-out."""
    import threading

    from tensorwire import _native

    errors = []

    def one():
        store = tensorwire.FileStore(str(tmp_path / "store"))
        errors.append(caught(lambda: _native.Group.from_store(store, 0, 2, timeout=2)))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(errors) == 2
