"""Ranks that form groups over stores of torch: a script for test_torch_stores.py.

`torch_store_ranks.py FOLDER CASE...` runs cases of CASES one after the other, each with real processes, and prints
one line of JSON per case: what its ranks gave. The lines that a rank logs are in FOLDER/CASE.RANK.log. torch is imported once and
the ranks are forked, because that import takes seconds; tensorwire is imported in the ranks only.

Under torchrun it is started without arguments, and forms a group over the store that torch meets in there.
"""

import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

LIMIT = 100


class UserStore(dist.Store):
    """A store of a user, with everything that a group needs."""

    def __init__(self, path, world):
        super().__init__()
        self.below = dist.FileStore(str(path), world)
        self.calls = []

    def set(self, key, value):
        self.calls.append("set")
        self.below.set(key, value)

    def get(self, key):
        return self.below.get(key)

    def add(self, key, amount):
        return self.below.add(key, amount)

    def check(self, keys):
        return self.below.check(keys)

    def wait(self, keys, timeout=None):
        raise AssertionError("a store with a check is not waited for")

    def compare_set(self, key, expected, desired):
        return self.below.compare_set(key, expected, desired)

    def delete_key(self, key):
        return self.below.delete_key(key)


class PoorStore:
    """The least that a group can be formed over, and not even torch's."""

    def __init__(self, path, world):
        self.below = dist.FileStore(str(path), world)

    def set(self, key, value):
        self.below.set(key, value)

    def get(self, key):
        return self.below.get(key)

    def add(self, key, amount):
        return self.below.add(key, amount)

    def wait(self, keys, timeout):
        until = time.monotonic() + timeout.total_seconds()
        while not self.below.check(keys):
            if time.monotonic() > until:
                raise RuntimeError("the wait has timed out")
            time.sleep(0.005)

    def delete_key(self, key):
        return self.below.delete_key(key)


class RotStore(dist.TCPStore):
    """A subclass whose keys are others in the server: only its own methods know them."""

    def set(self, key, value):
        super().set(key[::-1], value)

    def get(self, key):
        return super().get(key[::-1])

    def add(self, key, amount):
        return super().add(key[::-1], amount)

    def check(self, keys):
        return super().check([key[::-1] for key in keys])

    def compare_set(self, key, expected, desired):
        return super().compare_set(key[::-1], expected, desired)

    def delete_key(self, key):
        return super().delete_key(key[::-1])


class Brittle:
    """Every method raises what nobody expects."""

    def __getattr__(self, name):
        if name == "timeout":
            raise AttributeError(name)

        def method(*_args):
            raise ZeroDivisionError(f"no {name} today\nand more lines")

        return method


class Stuck(UserStore):
    """Its check never comes back."""

    def check(self, keys):
        time.sleep(3600)


def tcp(port, cls=dist.TCPStore):
    return cls("localhost", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


def prefixed(store):
    return dist.PrefixStore("b", dist.PrefixStore("", dist.PrefixStore("0/", store)))


def use(store, rank, world, name="test"):
    """Forms a group, uses and splits it; forms a second one over the same store."""
    import numpy
    from tensorwire._native import Group

    group = Group.from_store(store, rank, world, name=name, timeout=60)
    data = numpy.full(1000, rank + 1, dtype=numpy.float32)
    group.all_reduce(data)
    halves = [group.split(rank % 2).world for _ in range(2)]
    ends = sorted({0, world - 1})
    part = group.subgroup(ends) if rank in ends else None
    if part is not None:
        part.barrier()
    second = Group.from_store(store, rank, world, name=f"{name} two", timeout=60)
    second.barrier()
    group.barrier()
    return [float(data[0]), halves, second.world]


def raises(call):
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return None


def over_tcp(rank, world, port, _folder):
    return use(tcp(port), rank, world)


def over_tcp_prefixed(rank, world, port, _folder):
    return use(prefixed(tcp(port)), rank, world)


def over_slow_tcp(rank, world, port, _folder):
    """The server takes its time for what we ask to find the prefix, as torch's does while it looks up names."""
    return use(prefixed(tcp(slow(port))), rank, world)


def slow(port):
    """A port that leads to the server's."""
    listener = socket.create_server(("localhost", 0))

    def pump(source, target):
        try:
            while data := source.recv(65536):
                if b"tensorwire/probe/" in data:
                    time.sleep(0.7)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept():
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("localhost", port))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def over_full_tcp(rank, world, port, _folder):
    store = tcp(port)
    if rank == 0:
        store.multi_set([f"key {i}" for i in range(5000)], ["x"] * 5000)
        store.set("full", "")
    store.wait(["full"])
    return use(prefixed(store), rank, world)


def over_file(rank, world, _port, folder):
    return use(dist.FileStore(str(folder / "file"), world), rank, world)


def over_file_prefixed(rank, world, _port, folder):
    return use(prefixed(dist.FileStore(str(folder / "file p"), world)), rank, world)


def over_hash(rank, world, _port, _folder):
    return use(dist.HashStore(), rank, world) + use(prefixed(dist.HashStore()), rank, world)


def over_user(rank, world, _port, folder):
    store = UserStore(folder / "user", world)
    return use(store, rank, world) + [len(store.calls) > 0]


def over_user_prefixed(rank, world, _port, folder):
    store = UserStore(folder / "user p", world)
    return use(prefixed(store), rank, world) + [len(store.calls) > 0]


def over_poor(rank, world, _port, folder):
    return use(PoorStore(folder / "poor", world), rank, world)


def over_subclass(rank, world, port, _folder):
    return use(tcp(port, RotStore), rank, world)


def mixed(rank, world, port, _folder):
    """One rank is served by torch's methods, the others by a client of ours: they meet under the same keys."""
    if rank == 0:

        class Methods:
            def __init__(self, store):
                self.store = store

            def __getattr__(self, name):
                return getattr(self.store, name)

        return use(Methods(prefixed(tcp(port))), rank, world)
    return use(prefixed(tcp(port)), rank, world)


def waiting_thread(rank, world, port, _folder):
    """Another thread waits in the very store object, which then answers nobody else."""
    store = tcp(port)
    threading.Thread(target=lambda: raises(lambda: store.get("never")), daemon=True).start()
    time.sleep(0.2)
    return use(prefixed(store), rank, world)


def late(rank, world, _port, folder):
    """A rank is missing."""
    from tensorwire._native import Group

    return raises(lambda: Group.from_store(dist.FileStore(str(folder / "late"), world), 0, 2, timeout=1.0))


def brittle(rank, world, _port, _folder):
    from tensorwire._native import Group

    return raises(lambda: Group.from_store(Brittle(), 0, 2, timeout=1.0))


def stuck(rank, world, _port, folder):
    from tensorwire._native import Group

    return raises(lambda: Group.from_store(Stuck(folder / "stuck", world), 0, 2, timeout=1.0))


def nonsense(rank, world, _port, _folder):
    from tensorwire._native import Group

    return raises(lambda: Group.from_store(17, 0, 2, timeout=1.0))


def interrupted(rank, world, _port, folder):
    """Ctrl-C while waiting for another rank, and while a method of the store does not come back."""
    from tensorwire._native import Group

    took = []
    for store in (dist.FileStore(str(folder / "int"), world), Stuck(folder / "int stuck", world)):
        ours, others = os.pipe()
        pid = os.fork()
        if pid == 0:
            time.sleep(1)
            os.write(others, str(time.monotonic()).encode())
            os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
        try:
            Group.from_store(store, 0, 2, timeout=30.0)
        except KeyboardInterrupt:
            took.append(time.monotonic() - float(os.read(ours, 100)))
        os.waitpid(pid, 0)
    return took


def dead_server(rank, world, _port, _folder):
    """The server ends before the group is formed."""
    from tensorwire._native import Group

    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = tcp(server.port)
    del server
    return raises(lambda: Group.from_store(store, 0, 2, timeout=2.0))


def end_of_interpreter(rank, world, port, _folder):
    """A group that lives until the interpreter ends."""
    from tensorwire._native import Group

    sys.group = Group.from_store(UserStore(_folder / "end", world), rank, world, timeout=60)
    return True


CASES = {
    name: (case, worlds)
    for case, worlds in [
        (over_tcp, (2, 3)),
        (over_tcp_prefixed, (2, 3)),
        (over_slow_tcp, (1,)),
        (over_full_tcp, (2,)),
        (over_file, (2, 3)),
        (over_file_prefixed, (2,)),
        (over_hash, (1,)),
        (over_user, (2, 3)),
        (over_user_prefixed, (2,)),
        (over_poor, (2, 3)),
        (over_subclass, (2,)),
        (mixed, (3,)),
        (waiting_thread, (2,)),
        (late, (1,)),
        (brittle, (1,)),
        (stuck, (1,)),
        (nonsense, (1,)),
        (interrupted, (1,)),
        (dead_server, (1,)),
        (end_of_interpreter, (2,)),
    ]
    for name in [case.__name__]
}


def rank_main(case, name, rank, world, port, folder):
    """The life of a forked rank."""
    log = os.open(folder / f"{name}.{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    result = case(rank, world, port, folder)
    (folder / f"{name}.{rank}.json").write_text(json.dumps(result))


def run(name, world, libuv, folder):
    """Runs a case in processes and gives the results of its ranks, or what they wrote if one failed."""
    folder = folder / f"{name}-{world}-{libuv}"
    folder.mkdir()
    # The server comes after the forks: a lock that a thread of it holds in that moment would never be free in the child.
    gates = [os.pipe() for _ in range(world)]
    ranks = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                port = int(os.read(gates[rank][0], 20))
                rank_main(CASES[name][0], name, rank, world, port, folder)
                if name == "end_of_interpreter":
                    raise SystemExit
                status = 0
            except SystemExit:
                raise
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                if sys.exc_info()[0] is not SystemExit:
                    os._exit(status)
        ranks[pid] = rank
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    for theirs, ours in gates:
        os.write(ours, str(server.port).encode())
        os.close(theirs)
        os.close(ours)
    until = time.monotonic() + LIMIT
    failed = []
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank = ranks.pop(pid)
            if status:
                failed.append(f"rank {rank} ended with {status}")
        elif time.monotonic() > until:
            for pid, rank in ranks.items():
                failed.append(f"rank {rank} hangs")
                os.kill(pid, signal.SIGKILL)
            until += 10
        else:
            time.sleep(0.005)
    logs = {rank: (folder / f"{name}.{rank}.log").read_text() for rank in range(world)}
    left = [key for key in server.list_keys() if "probe" in key]
    if failed:
        return {"failed": failed, "logs": logs}
    results = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(world)]
    return {"results": results, "logs": logs, "left": left}


def under_torchrun():
    store, rank, world = next(dist.rendezvous("env://"))
    # In one write: another rank's line may come in between otherwise.
    sys.stdout.write(json.dumps([type(store).__name__, use(store, rank, world)]) + "\n")
    sys.stdout.flush()


def main():
    if len(sys.argv) == 1:
        return under_torchrun()
    folder = Path(sys.argv[1])
    for wanted in sys.argv[2:]:
        name, world, libuv = wanted.split(":")
        outcome = run(name, int(world), libuv == "libuv", folder)
        print(json.dumps({"case": wanted, **outcome}), flush=True)


if __name__ == "__main__":
    main()
