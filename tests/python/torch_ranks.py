"""Runs the bodies of tests on the ranks of a process group of torch, in processes that live as long as pytest.

::

    from torch_ranks import on_ranks, world  # the fixture

    @on_ranks
    def test_sum(rank, size):
        ...
"""

import atexit
import contextlib
import importlib
import multiprocessing
import tempfile
import traceback
from datetime import timedelta

import pytest

SIZE = 2
#: Seconds after which a body counts as hanging.
LIMIT = 200


def on_ranks(body):
    """A test whose body runs on every rank, with (rank, size)."""

    def test(world):
        world.run(body.__module__, body.__name__)

    test.body = body
    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    return test


@pytest.fixture(scope="session")
def world():
    """The processes, which all test files share: each has to import torch."""
    return _ranks


class Ranks:
    """The processes. They are started by the first test, and again after one that failed."""

    def __init__(self):
        self.pipes = []
        self.processes = []
        self.folder = None

    def run(self, module, name):
        """Runs a body on all ranks; fails with the traces of those where it failed."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((module, name))
        traces = []
        for rank, pipe in enumerate(self.pipes):
            # A rank that waits for a failed one has its answer soon, because that one's process is ended first.
            limit = 10 if traces else LIMIT
            try:
                trace = pipe.recv() if pipe.poll(limit) else "no answer"
            except (EOFError, OSError):
                trace = "the process ended"
            if trace:
                traces.append(f"rank {rank}: {trace}")
        if traces:
            self.close()
            pytest.fail("\n".join(traces), pytrace=False)

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, f"{self.folder.name}/store", there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.pipes, self.processes = [], []
        if self.folder is not None:
            self.folder.cleanup()


_ranks = Ranks()
atexit.register(_ranks.close)


def serve(rank, path, pipe):
    """The life of one process."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "tensorwire", init_method=f"file://{path}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    while (order := pipe.recv()) is not None:
        module, name = order
        try:
            getattr(importlib.import_module(module), name).body(rank, SIZE)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    distributed.destroy_process_group()
