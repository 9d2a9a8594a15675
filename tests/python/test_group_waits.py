"""Waits let other threads run and answer Ctrl-C."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import here

import tensorwire
from tensorwire import _native

#: Far above what is promised; only there against hanging. The time-outs of the groups are longer.
SOON = 45


@pytest.fixture(autouse=True)
def answers_ctrl_c():
    """A shell's background jobs start without."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


class interrupt:
    """Sends us a signal once we are likely to be waiting."""

    def __init__(self, number=signal.SIGINT, after=0.3):
        self.timer = threading.Timer(after, self.send, (number,))
        self.sent = None

    def send(self, number):
        self.sent = time.monotonic()
        os.kill(os.getpid(), number)

    def __enter__(self):
        self.timer.start()
        return self

    def __exit__(self, *_):
        self.timer.join()
        assert time.monotonic() - self.sent < SOON


WAITS = {
    "barrier": lambda group: group.barrier(),
    "all_reduce": lambda group: group.all_reduce(np.zeros(10)),
    "large all_reduce": lambda group: group.all_reduce(np.zeros(500_000)),
    "recv": lambda group: group.recv(np.zeros(10), 1),
    "recv_any": lambda group: group.recv_any(np.zeros(10), 2),
    "large send": lambda group: group.send(np.zeros(4_000_000), 1),
    "broadcast": lambda group: group.broadcast(np.zeros(10), 1),
    "work of all_reduce": lambda group: group.all_reduce(np.zeros(10), async_op=True).wait(),
    "work of recv": lambda group: group.recv(np.zeros(10), 1, 3, async_op=True).wait(),
    "work of recv_any": lambda group: group.recv_any(np.zeros(10), 4, async_op=True).wait(),
    "work of barrier": lambda group: group.barrier(async_op=True).wait(),
    "work with a time-out": lambda group: group.recv(np.zeros(10), 1, 5, async_op=True).wait(50),
    "subgroup": lambda group: group.subgroup([0, 1]),
    "split": lambda group: group.split(0),
}


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_a_wait(pools, name):
    pools(2).run(check_ctrl_c, name)


def check_ctrl_c(name):
    group, rank = here().fresh(), here().rank
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupt():
            WAITS[name](group)
    here().group.barrier()
    group.close()


def test_ctrl_c_while_ranks_are_missing(tmp_path):
    store = tensorwire.FileStore(str(tmp_path / "store"))
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_store(store, 0, 2, timeout=60)
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_store(store, 1, 2, name="other", timeout=60)
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_store(tensorwire.MemoryStore(), 0, 2, timeout=60)
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_url(f"file://{tmp_path}/url", rank=0, world=2, timeout=60)
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_url("tcp://127.0.0.1:0", rank=0, world=2, timeout=60)


def test_ctrl_c_while_the_store_is_missing():
    with pytest.raises(KeyboardInterrupt), interrupt():
        _native.Group.from_url("tcp://127.0.0.1:9", rank=1, world=2, timeout=60)
    with pytest.raises(KeyboardInterrupt), interrupt():
        tensorwire.TcpStore("127.0.0.1", 9, 60)


def test_messages_after_ctrl_c(pools):
    """A message that comes after Ctrl-C is not lost to the wait that was left."""
    pools(2).run(check_after)


def check_after():
    group, own, rank = here().fresh(), here().group, here().rank
    x = np.zeros(3)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupt():
            group.recv(x, 1)
        with pytest.raises(KeyboardInterrupt), interrupt():
            group.recv_any(x)
        own.barrier()
        group.recv(x, 1)
        assert (x == 3).all()
    else:
        own.barrier()
        group.send(np.full(3, 3.0), 0)
    own.barrier()
    group.close()


def test_a_work_goes_on_after_ctrl_c(pools):
    pools(2).run(check_work_goes_on)


def check_work_goes_on():
    group, own, rank = here().fresh(), here().group, here().rank
    x = np.full(3, 1.0)
    if rank == 0:
        work = group.all_reduce(x, async_op=True)
        with pytest.raises(KeyboardInterrupt), interrupt():
            work.wait()
        own.barrier()
        work.wait()
    else:
        own.barrier()
        group.all_reduce(x)
    assert (x == 2).all()
    group.barrier()
    group.close()


def test_handlers_that_return_do_not_end_a_wait(pools):
    pools(2).run(check_handler)


def check_handler():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 0:
        seen = []
        old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
        try:
            x = np.zeros(3)
            work = group.recv(x, 1, async_op=True)
            with interrupt(signal.SIGUSR1) as first:
                with pytest.raises(TimeoutError):
                    work.wait(2)
            # It ran while we waited, not after.
            assert seen and seen[0] - first.sent < 1.9
            with interrupt(signal.SIGUSR1):
                own.barrier()
                group.barrier()
            work.wait()
            assert len(seen) == 2
        finally:
            signal.signal(signal.SIGUSR1, old)
    else:
        time.sleep(0.2)
        own.barrier()
        group.send(np.ones(3), 0)
        group.barrier()
    own.barrier()
    group.close()


class Special(Exception):
    pass


def test_handlers_may_raise_anything(pools):
    pools(2).run(check_special)


def check_special():
    group, rank = here().fresh(), here().rank
    if rank == 0:

        def handler(*_):
            raise Special("from a handler")

        old = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(Special, match="from a handler"), interrupt(signal.SIGUSR1):
                group.recv(np.zeros(3), 1)
        finally:
            signal.signal(signal.SIGUSR1, old)
    here().group.barrier()
    group.close()


def test_a_handler_may_use_the_group(pools):
    pools(2).run(check_handler_uses)


def check_handler_uses():
    group, rank = here().fresh(), here().rank
    if rank == 0:
        old = signal.signal(signal.SIGUSR1, lambda *_: group.send(np.full(1, 5.0), 0, 8))
        try:
            x = np.zeros(1)
            with interrupt(signal.SIGUSR1):
                group.recv(x, 0, 8)  # sent by the handler
            assert x[0] == 5
        finally:
            signal.signal(signal.SIGUSR1, old)
    here().group.barrier()
    group.close()


def test_ctrl_c_goes_to_the_main_thread_only(pools):
    """A wait on another thread goes on; the main thread, which is elsewhere, gets the exception."""
    pools(2).run(check_other_thread)


def check_other_thread():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 0:
        x, errors = np.zeros(3), []

        def wait():
            try:
                group.recv(x, 1)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(KeyboardInterrupt), interrupt():
            time.sleep(SOON)
        time.sleep(0.3)
        assert thread.is_alive() and not errors
        own.barrier()
        thread.join(SOON)
        assert not errors and (x == 1).all()
    else:
        own.barrier()
        group.send(np.ones(3), 0)
    own.barrier()
    group.close()


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "recv", "recv_any", "work of all_reduce"])
def test_other_threads_run_during_a_wait(pools, name):
    pools(2).run(check_others_run, name)


def check_others_run(name):
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 0:
        counted = [0]
        stop = threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        before = counted[0]
        with pytest.raises(KeyboardInterrupt), interrupt():
            WAITS[name](group)
        assert counted[0] > before + 5
        stop.set()
        thread.join()
    own.barrier()
    group.close()


def test_a_wait_for_a_rank_that_needs_our_other_thread(pools):
    """The rank that we wait for waits for another thread of ours."""
    pools(2).run(check_needs_thread)


def check_needs_thread():
    group, rank = here().fresh(), here().rank
    x = np.zeros(1)
    if rank == 0:
        thread = threading.Timer(0.2, group.send, (np.array([4.0]), 1, 1))
        thread.start()
        group.recv(x, 1, 2)
        thread.join()
        assert x[0] == 5
    else:
        group.recv(x, 0, 1)
        group.send(x + 1, 0, 2)
    here().group.barrier()
    group.close()
