"""Ranks for tests: worker processes that run functions of test files by name.

Most tests use the pool of their world size, whose processes live as long as the session and share one group. Tests that
kill, stop or break a rank start ranks of their own.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import tensorwire
from tensorwire import _native

#: How long a function may take on a rank before the test fails. Only there against hanging.
PATIENCE = 200

#: Time-out of the groups, above everything that a test waits for on purpose.
TIMEOUT = 60


class RankFailed(AssertionError):
    """A function failed on some ranks; the text has what each of them did."""


class Rank:
    """One worker process."""

    def __init__(self, rank, world, folder, env=None):
        self.rank = rank
        self.log = Path(folder) / f"rank{rank}.log"
        ours, theirs = socket.socketpair()
        code = f"import ranks; ranks.serve({theirs.fileno()}, {rank}, {world}, {str(folder)!r})"
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self.line = Connection(ours.detach())
        self.pid = self.process.pid

    def start(self, function, *args):
        """Runs `function(*args)` there; result() waits for it."""
        self.line.send((function.__module__, function.__name__, args))

    def ready(self, timeout):
        return self.line.poll(timeout)

    def answer(self, timeout=PATIENCE):
        """Whether it went well, and the result or the traceback."""
        try:
            if not self.line.poll(timeout):
                return False, f"no answer within {timeout} s\n{self.stacks()}"
            return self.line.recv()
        except (EOFError, ConnectionResetError):
            return False, f"the process ended: {self.process.wait(30)}\n{self.output()}"

    def result(self, timeout=PATIENCE):
        well, value = self.answer(timeout)
        if not well:
            raise RankFailed(f"rank {self.rank}:\n{value}")
        return value

    def call(self, function, *args):
        self.start(function, *args)
        return self.result()

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def exit_code(self, timeout=PATIENCE):
        """Waits for its end."""
        return self.process.wait(timeout)

    def output(self):
        return self.log.read_text(errors="replace")[-8000:]

    def stacks(self):
        """Ends it with the stacks of all its threads."""
        with contextlib.suppress(ProcessLookupError):
            self.kill(signal.SIGCONT)
            self.kill(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return self.output()

    def end(self):
        self.line.close()

    def reap(self):
        with contextlib.suppress(ProcessLookupError):
            self.kill(signal.SIGCONT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Ranks:
    """Worker processes, one for each rank."""

    def __init__(self, world, env=None, each=lambda _rank: {}):
        """`env` are variables of all ranks, `each` gives those of one."""
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        own = [{**(env or {}), **each(rank)} for rank in range(world)]
        self.all = [Rank(rank, world, self.folder.name, own[rank]) for rank in range(world)]
        self.broken = False

    def __getitem__(self, rank):
        return self.all[rank]

    def __len__(self):
        return len(self.all)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, function, *args, timeout=PATIENCE):
        """Runs `function(*args)` on all ranks and gives the results in order."""
        for rank in self.all:
            rank.start(function, *args)
        return self.results(timeout)

    def results(self, timeout=PATIENCE):
        deadline = time.monotonic() + timeout
        answers = {}
        while len(answers) < len(self.all):
            for rank in self.all:
                left = deadline - time.monotonic()
                if rank.rank not in answers and (left <= 0 or rank.ready(0.02)):
                    answers[rank.rank] = rank.answer(0)
                    if not answers[rank.rank][0]:
                        # The others may wait for this one: what they say is worth some seconds only.
                        deadline = min(deadline, time.monotonic() + 10)
        if not all(well for well, _ in answers.values()):
            self.broken = True
            ends = [(rank, "went well" if well else value) for rank, (well, value) in sorted(answers.items())]
            texts = [f"rank {rank}: {end}" for rank, end in ends]
            raise RankFailed("\n".join(texts))
        return [answers[rank.rank][1] for rank in self.all]

    def close(self):
        for rank in self.all:
            rank.end()
        for rank in self.all:
            rank.reap()
        self.folder.cleanup()


class Pools:
    """Long-lived ranks for each world size."""

    def __init__(self):
        self.pools = {}

    def __call__(self, world):
        pool = self.pools.get(world)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = self.pools[world] = Ranks(world)
        return pool

    def close(self):
        for pool in self.pools.values():
            pool.close()


# What follows runs in the workers.

_here = None


class Here:
    """What the functions of a worker find: its place, and groups."""

    def __init__(self, rank, world, folder):
        self.rank, self.world, self.folder = rank, world, folder
        self.calls = 0
        self.made = 0
        self._group = None

    @property
    def store(self):
        """A new client of the store of these ranks."""
        return tensorwire.FileStore(str(Path(self.folder) / "store"))

    @property
    def group(self):
        """The group that all functions share."""
        if self._group is None:
            self._group = self.fresh("shared")
        return self._group

    def fresh(self, name=None, *, timeout=TIMEOUT):
        """A group of one's own; all ranks make them in the same order."""
        if name is None:
            self.made += 1
            name = f"call{self.calls}-{self.made}"
        return _native.Group.from_store(self.store, self.rank, self.world, name=name, timeout=timeout)


def here() -> Here:
    return _here


def serve(fd, rank, world, folder):
    """The life of a worker: runs what the other side names, until that goes away."""
    global _here
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without
    _here = Here(rank, world, folder)
    line = Connection(fd)
    while True:
        try:
            module, name, args = line.recv()
        except (EOFError, ConnectionResetError):
            return
        _here.calls += 1
        _here.made = 0
        try:
            answer = True, getattr(importlib.import_module(module), name)(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            line.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
