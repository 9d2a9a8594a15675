"""Every method of a store, through Python, on every kind of store. What they mean is tested in Rust."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import tensorwire


@pytest.fixture(params=["memory", "file", "tcp", "prefix"])
def store(request, tmp_path):
    match request.param:
        case "memory":
            yield tensorwire.MemoryStore()
        case "file":
            yield tensorwire.FileStore(tmp_path / "store")
        case "tcp":
            with tensorwire.TcpServer("127.0.0.1") as server:
                yield tensorwire.TcpStore(server.host, server.port, timeout=60)
        case "prefix":
            yield tensorwire.PrefixStore("part", tensorwire.MemoryStore())


def test_values(store):
    store.set("text", "grüße")
    store.set("bytes", b"\x00\xff")
    assert store.get("text") == "grüße".encode()
    assert store.get("bytes") == b"\x00\xff"
    store.append("bytes", b"!")
    assert store.multi_get(["bytes", "text"]) == [b"\x00\xff!", "grüße".encode()]
    assert store.list_keys() == ["bytes", "text"]
    assert store.num_keys() == 2
    assert store.delete_key("text") is True
    assert store.delete_key("text") is False


def test_counters(store):
    assert store.add("n", 2) == 2
    assert store.add("n", -5) == -3
    assert store.get("n") == b"-3"


def test_compare_set(store):
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", b"first", b"second") == b"second"


def test_check_and_wait(store):
    assert store.check(["a"]) is False
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.check(["a", "b"]) is True
    assert store.wait(["a", "b"], 1.5) is None


def test_queues(store):
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert store.queue_len("q") == 2
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", block=False) == b"2"
    with pytest.raises(tensorwire.MisuseError, match="'q'|\"q\""):
        store.queue_pop("q", block=False)


def test_barrier_and_clone(store):
    other = store.clone()
    assert isinstance(other, tensorwire.Store)
    for _ in range(3):
        thread = threading.Thread(target=other.barrier, args=("here", 2))
        thread.start()
        store.barrier("here", 2)
        thread.join()


def test_clone_has_its_own_timeout(store):
    other = store.clone()
    other.set_timeout(1)
    assert store.timeout != other.timeout


def test_mistakes_are_the_callers(store):
    with pytest.raises(ValueError, match="2 keys, 1 values"):
        store.multi_set(["a", "b"], ["1"])
    store.set("word", "x")
    with pytest.raises(tensorwire.MisuseError, match="word"):
        store.add("word", 1)
    with pytest.raises(TypeError):
        store.set("key", 1)


def test_repr_names_the_kind(store):
    assert type(store).__name__ in repr(store)


def test_server_that_ends_is_a_peers_fault():
    server = tensorwire.TcpServer("127.0.0.1")
    store = tensorwire.TcpStore("127.0.0.1", server.port, timeout=60)
    waiter = threading.Timer(0.1, server.close)
    waiter.start()
    with pytest.raises(tensorwire.PeerError) as caught:
        store.get("missing")
    waiter.join()
    assert caught.value.kind == "left"
    assert caught.value.rank is None


def test_server_that_is_not_there_is_a_timeout():
    with tensorwire.TcpServer("127.0.0.1") as server:
        port = server.port
    with pytest.raises(TimeoutError, match=str(port)):
        tensorwire.TcpStore("127.0.0.1", port, timeout=0.2)


def test_port_that_is_taken_is_said():
    with tensorwire.TcpServer("127.0.0.1") as server, pytest.raises(tensorwire.TensorwireError, match="in use"):
        tensorwire.TcpServer("127.0.0.1", server.port)


USERS_STORE = """
import os, sys
import tensorwire

class Store:  # the least that a group can be formed over
    def __init__(self, path):
        self.below = tensorwire.FileStore(path)
        for name in ["set", "get", "add", "check", "wait", "delete_key"]:
            setattr(self, name, getattr(self.below, name))

rank = int(sys.argv[2])
group = tensorwire.Group.from_store(Store(sys.argv[1]), rank, 2, timeout=60)
assert group.split(0).world == 2
print("ready", flush=True)
if rank == 1:
    sys.stdin.read()
try:
    group.split(0)
except tensorwire.PeerError as error:
    print(error)
"""


def test_a_death_ends_a_split_over_a_store_of_a_user(tmp_path):
    command = [sys.executable, "-c", USERS_STORE, str(tmp_path / "store")]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe, text=True) for rank in range(2)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    tensorwire.FileStore(tmp_path / "store").wait(["tensorwire/world/split/1/0"], 60)
    os.kill(ranks[1].pid, signal.SIGKILL)
    said, _ = ranks[0].communicate(timeout=50)
    assert "was killed by SIGKILL" in said
    ranks[1].communicate()
