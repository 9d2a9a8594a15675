"""The store and torch's TCPStore and FileStore, in both directions, with the torch that is installed here.

The other side is `store_peer`, an example of the Rust library: it serves for torch's clients, and runs the conformance
suite of stores against torch's servers.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import textwrap
import threading

import pytest

dist = pytest.importorskip("torch.distributed")

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG = datetime.timedelta(seconds=60)
SHORT = datetime.timedelta(milliseconds=200)
HOST = "127.0.0.1"


@pytest.fixture(scope="session")
def peer():
    """The path of the `store_peer` program."""
    build = ["cargo", "build", "--quiet", "-p", "tensorwire", "--example", "store_peer"]
    subprocess.run(build, cwd=ROOT, check=True)
    metadata = ["cargo", "metadata", "--format-version=1", "--no-deps"]
    found = json.loads(subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True).stdout)
    return pathlib.Path(found["target_directory"]) / "debug" / "examples" / "store_peer"


@pytest.fixture
def port(peer):
    """The port of a fresh server of ours."""
    with subprocess.Popen([peer, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield int(server.stdout.readline())
        server.stdin.close()
        assert server.wait(10) == 0


def client(port, timeout=LONG, **kwargs):
    return dist.TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False, **kwargs)


def torch_server():
    return dist.TCPStore(HOST, 0, is_master=True, timeout=LONG, wait_for_workers=False)


def answers(store):
    """What a store says to one of everything."""
    yield store.set("key", "value"), store.get("key")
    yield store.set("bytes", bytes(range(256)).decode("latin1")), store.get("bytes")
    yield store.set("empty", ""), store.get("empty")
    yield store.add("count", 5), store.add("count", -7), store.get("count")
    yield store.add("key2", 1), store.set("key2", "41"), store.add("key2", 1)
    yield store.compare_set("cas", "expected", "desired"), store.check(["cas"])
    yield store.compare_set("cas", "", "first"), store.compare_set("cas", "wrong", "second")
    yield store.compare_set("cas", "first", "second"), store.get("cas")
    yield store.check(["key"]), store.check(["key", "absent"]), store.check(["absent"]), store.check([])
    yield store.wait(["key", "count"]), store.wait(["key"], SHORT)
    yield store.append("log", "ab"), store.append("log", "cd"), store.get("log")
    yield store.multi_set(["m1", "m2", "m3"], ["1", "", "3" * 100_000]), store.multi_get(["m3", "m1", "m2"])
    yield store.num_keys(), sorted(store.list_keys())
    yield store.delete_key("key"), store.delete_key("key"), store.check(["key"]), store.num_keys()
    yield store.queue_push("q", "1"), store.queue_push("q", "2"), store.queue_len("q"), store.queue_len("none")
    yield store.check(["q"]), store.num_keys(), store.delete_key("q"), store.queue_pop("q"), store.queue_pop("q")
    yield store.check(["q"]), store.queue_len("q")
    with pytest.raises(Exception, match="empty"):
        store.queue_pop("q", False)
    with pytest.raises(dist.DistStoreError):
        store.wait(["absent"], SHORT)
    with pytest.raises(dist.DistStoreError):
        store.wait(["key2", "absent"], datetime.timedelta(0))
    yield store.get("key2"), store.has_extended_api()
    other = store.clone()
    yield other.set("from clone", "1"), store.get("from clone"), other.timeout


def test_same_answers_as_torchs_server(port):
    assert list(answers(client(port))) == list(answers(torch_server()))


def test_waits_end_when_keys_come(port):
    changes = [
        lambda store, key: store.set(key, "1"),
        lambda store, key: store.add(key, 1),
        lambda store, key: store.append(key, "1"),
        lambda store, key: store.multi_set([key], ["1"]),
        lambda store, key: store.compare_set(key, "", "1"),
    ]
    waiter, changer = client(port), client(port)
    for number, change in enumerate(changes):
        key = f"key{number}"
        timer = threading.Timer(0.05, change, (changer, key))
        timer.start()
        assert waiter.get(key) == b"1"
        timer.join()
    timer = threading.Timer(0.05, changer.queue_push, ("queue", "p"))
    timer.start()
    assert waiter.queue_pop("queue") == b"p"
    timer.join()
    # A later push must not wake this client, which now waits for something else.
    changer.queue_push("queue", "again")
    with pytest.raises(dist.DistStoreError):
        waiter.wait(["never"], SHORT)
    assert waiter.add("sum", 3) == 3


@pytest.mark.skipif(not hasattr(dist.TCPStore, "barrier"), reason="this torch has no barrier")
def test_barrier_again_and_again(port):
    world, rounds, early = 3, 4, []

    def member():
        store = client(port)
        for number in range(1, rounds + 1):
            store.add("entered", 1)
            store.barrier("meet", world, LONG)
            if store.add("entered", 0) < number * world:
                early.append(number)

    run_threads(member, world)
    assert not early
    # Who gives up is not counted.
    store = client(port)
    for _ in range(2):
        with pytest.raises(dist.DistStoreError):
            store.barrier("lonely", 2, SHORT)


def test_fifty_clients_at_once(port):
    world = 50
    done = []

    def member():
        store = client(port)
        rank = store.add("rank", 1)
        store.set(f"rank{rank}", str(rank))
        store.wait([f"rank{other}" for other in range(1, world + 1)])
        got = store.multi_get([f"rank{other}" for other in range(1, world + 1)])
        done.append(got == [str(other).encode() for other in range(1, world + 1)])

    run_threads(member, world)
    assert done == [True] * world


def test_one_bad_client_harms_nobody(port):
    good = client(port)
    bad = client(port)
    bad.set("text", "abc")
    with pytest.raises(dist.DistError):
        bad.add("text", 1)
    half = socket.create_connection((HOST, port))
    half.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 1, 100) + b"half of a key")
    garbage = socket.create_connection((HOST, port))
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert garbage.recv(1) == b""
    large = socket.create_connection((HOST, port))
    large.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 3, 1 << 60))
    assert large.recv(1) == b""
    assert good.add("fine", 1) == 1
    half.close()


GLOO = """
    import datetime, sys, torch, torch.distributed as dist
    rank, world, port, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    timeout = datetime.timedelta(seconds=60)
    if how == "store":
        store = dist.TCPStore("127.0.0.1", port, world, False, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    for _ in range(3):
        tensor = torch.full((1000,), float(rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(world * (world + 1) / 2).all()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("how", ["store", "env"])
def test_process_group_over_our_server(port, world, how):
    import os

    def member(rank):
        env = dict(os.environ, MASTER_ADDR=HOST, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        # With an agent's store every rank is a client.
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        args = [sys.executable, "-c", textwrap.dedent(GLOO), str(rank), str(world), str(port), how]
        return subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    members = [member(rank) for rank in range(world)]
    for process in members:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output


@pytest.mark.parametrize("libuv", [True, False], ids=["libuv", "legacy"])
def test_our_client_and_torchs_server(peer, libuv):
    # The legacy server has no queues.
    skip = [] if libuv else ["queue", "pushed", "poppers"]
    with torch_server_without_names(libuv) as port:
        exercise = [peer, "exercise", HOST, str(port), *skip]
        run = subprocess.run(exercise, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.count(" ok\n") > 15
        store = client(port)
        store.set("still here", "1")
        assert store.get("still here") == b"1"


@contextlib.contextmanager
def torch_server_without_names(libuv):
    """The port of a server of torch in a process of its own, which asks no name server.

    torch's servers look up the name of each client, and answer nobody meanwhile. One answer of a name server that is lost
    costs 5 seconds. The suite expects answers within half a second of some deadlines. The C library reads RES_OPTIONS when a
    process looks up its first name, so it cannot be set in this one.
    """
    serve = """
        import datetime, sys, torch.distributed as dist
        long = datetime.timedelta(seconds=60)
        libuv = sys.argv[1] == "True"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=long, wait_for_workers=False, use_libuv=libuv)
        print(store.port, flush=True)
        sys.stdin.read()
    """
    run = [sys.executable, "-c", textwrap.dedent(serve), str(libuv)]
    environment = {**os.environ, "RES_OPTIONS": "attempts:0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        yield int(server.stdout.readline())
        server.stdin.close()
        assert server.wait(60) == 0


def test_one_file_for_both(peer, tmp_path):
    path = tmp_path / "store"
    store = dist.FileStore(str(path), -1)
    store.set("from torch", "1")
    store.add("count", 5)
    store.set("gone", "1")
    store.delete_key("gone")
    run = subprocess.run([peer, "file", path], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert store.get("file/from us") == b"to torch"
    assert store.add("count", 0) == 6
    assert store.get("from torch") == b"1"


def run_threads(target, count):
    failures = []

    def guarded():
        try:
            target()
        except BaseException as error:  # noqa: BLE001, shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures
