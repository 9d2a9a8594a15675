"""Waits let other threads run and answer Ctrl-C."""

import datetime
import os
import signal
import threading
import time

import pytest

import tensorwire


@pytest.fixture
def store():
    return tensorwire.MemoryStore()


WAITS = {
    "get": lambda store: store.get("missing"),
    "wait": lambda store: store.wait(["missing"]),
    "multi_get": lambda store: store.multi_get(["missing"]),
    "queue_pop": lambda store: store.queue_pop("missing"),
    "barrier": lambda store: store.barrier("missing", 2),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait(store, wait):
    with pytest.raises(KeyboardInterrupt), interrupt_soon() as sent:
        wait(store)
    # The promise is 100 ms; what is asserted is only that it is nowhere near the time-out.
    assert time.monotonic() - sent[0] < 100


def test_store_works_after_ctrl_c(store):
    with pytest.raises(KeyboardInterrupt), interrupt_soon():
        store.get("a")
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_value_is_not_lost_to_an_interrupted_pop(store):
    with pytest.raises(KeyboardInterrupt), interrupt_soon():
        store.queue_pop("q")
    store.queue_push("q", "precious")
    store.set_timeout(30)
    assert store.queue_pop("q") == b"precious"


def test_handler_that_returns_does_not_end_a_wait(store):
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1) or store.set("a", "b"))
    try:
        with interrupt_soon(signal.SIGUSR1):
            assert store.get("a") == b"b"
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen == [1]


def test_other_threads_run_during_a_wait(store):
    setter = threading.Timer(0.05, store.set, ("a", "b"))
    setter.start()
    assert store.get("a") == b"b"
    setter.join()


@pytest.mark.parametrize("timeout", [0.05, datetime.timedelta(milliseconds=50)], ids=["seconds", "timedelta"])
def test_deadline_passes(store, timeout):
    with pytest.raises(TimeoutError, match="missing") as caught:
        store.wait(["missing"], timeout)
    assert isinstance(caught.value, tensorwire.TimeoutError)


def test_timeout_of_the_store(store):
    assert store.timeout == datetime.timedelta(seconds=300)
    store.set_timeout(0.05)
    assert store.timeout == datetime.timedelta(milliseconds=50)
    with pytest.raises(tensorwire.TimeoutError):
        store.get("missing")
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            store.set_timeout(wrong)


class interrupt_soon:
    """Sends us a signal once we are likely to be waiting. Gives a list that then holds the moment it was sent."""

    def __init__(self, number=signal.SIGINT):
        self.sent = []
        self.timer = threading.Timer(0.2, self.send, (number,))

    def send(self, number):
        self.sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    def __enter__(self):
        self.timer.start()
        return self.sent

    def __exit__(self, *_):
        self.timer.join()
