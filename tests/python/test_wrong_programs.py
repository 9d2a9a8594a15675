"""What users read when one rank of 2, 4 or 8 does something wrong: who is named, and what is said of it."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from wrong_programs import WRONG

#: Only there against hanging.
PATIENCE = 280

WORLDS = (2, 4, 8)
KINDS = ("numpy", pytest.param("torch", marks=pytest.mark.interop))


class Process:
    """One rank. Its standard error goes to a file."""

    def __init__(self, kind, log):
        self.log = log
        program = Path(__file__).with_name("wrong_programs.py")
        with open(log, "wb") as errors:
            self.child = subprocess.Popen(
                [sys.executable, program, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.answers = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.child.stdout:
            if line.startswith(">> "):
                self.answers.put(json.loads(line[3:]))
        self.answers.put(None)

    def tell(self, order):
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()

    def hear(self):
        try:
            return self.answers.get(timeout=PATIENCE)
        except queue.Empty:
            self.end()
            raise AssertionError(f"pid {self.child.pid} hangs:\n{self.errors()}") from None

    def errors(self):
        return self.log.read_text(errors="replace")[-4000:]

    def end(self):
        with contextlib.suppress(OSError):
            self.child.send_signal(signal.SIGCONT)
        self.child.kill()
        self.child.wait()


class Pool:
    """Processes that run one program after the other: to import torch takes longer than all programs."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.processes, self.count = [], 0

    def ranks(self, world):
        self.processes = [process for process in self.processes if process.child.poll() is None]
        while len(self.processes) < world:
            self.count += 1
            self.processes.append(Process(self.kind, self.folder / f"{self.kind}{self.count}.log"))
        return self.processes[:world]

    @contextlib.contextmanager
    def run(self, program, world):
        """Gives the ranks, which have begun the program. They are not used again after a failure."""
        self.count += 1
        ranks = self.ranks(world)
        try:
            for rank, process in enumerate(ranks):
                path = str(self.folder / f"store{self.count}")
                process.tell({"program": program, "rank": rank, "world": world, "path": path})
            yield ranks
        except BaseException:
            self.close()
            raise

    def close(self):
        for process in self.processes:
            process.end()


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong_programs")
    pools = {kind: Pool(kind, folder) for kind in ("numpy", "torch")}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=KINDS)
def pool(request, pools):
    if request.param == "torch":
        pytest.importorskip("torch")
    return pools[request.param]


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


def others(world):
    return [rank for rank in range(world) if rank != WRONG]


def listed(ranks):
    """As messages list ranks: "rank 0", "ranks 0 and 2"; runs of more than two may be shortened."""
    return "rank 0" if len(ranks) == 1 else "ranks 0"


MISMATCHES = {
    "another_operation": ("all_reduce", "broadcast"),
    "another_op": ("SUM", "MAX"),
    "another_size": ("999 float32", "1000 float32"),
    "another_type": ("1000 float32", "1000 float64"),
}


@pytest.mark.parametrize("program", MISMATCHES)
def test_ranks_that_call_different_things(pool, world, program):
    right, wrong = MISMATCHES[program]
    with pool.run(program, world) as ranks:
        seen = [rank.hear() for rank in ranks]
        for rank, error in enumerate(seen):
            assert "MismatchError" in error["class"], error
            text = error["text"]
            assert re.search(rf"{listed(others(world))}\b[^;]*{right}", text), text
            assert re.search(rf"rank {WRONG}\b[^;]*{wrong}", text), text
            # With two ranks nobody can know who is right.
            assert error["rank"] == (None if world == 2 else WRONG), error
            assert error["ranks"] == ([] if world == 2 else [WRONG]), error
            own = wrong if rank == WRONG else right
            assert re.search(rf"(this rank|you)\b.*{own}", text), text


def test_another_root_in_the_last_operation(pool, world):
    """All have another one: nobody is right, and everybody hears of it at the latest when it closes."""
    with pool.run("another_root", world) as ranks:
        seen = [rank.hear() for rank in ranks]
        assert any("MismatchError" in error["class"] for error in seen), seen
        for rank, error in enumerate(seen):
            if "MismatchError" in error["class"]:
                assert f"from rank {rank}" in error["text"].partition("this rank")[2], (rank, error)


def test_a_rank_that_sleeps(pool, world):
    with pool.run("asleep", world) as ranks:
        assert ranks[WRONG].hear() == "asleep"
        for rank in others(world):
            error = ranks[rank].hear()
            is_time_out(error)
            # Outside of us, and what it did last.
            assert "barrier #1" in error["text"], error
        ranks[WRONG].tell({})
        late = ranks[WRONG].hear()
        # The effect, with its cause.
        assert "all_reduce #2" in late["text"] and "timed out" in late["text"], late


def test_a_rank_that_waits_for_a_message(pool, world):
    with pool.run("receiving", world) as ranks:
        for rank in others(world):
            error = ranks[rank].hear()
            is_time_out(error)
            assert "recv" in error["text"], error
        ranks[WRONG].hear()


def test_a_rank_that_is_stopped(pool, world):
    with pool.run("stopped", world) as ranks:
        for rank in others(world):
            assert ranks[rank].hear() == "waits"
        stat = Path(f"/proc/{ranks[WRONG].child.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "T":
            pass
        for rank in others(world):
            ranks[rank].tell({})
        for rank in others(world):
            error = ranks[rank].hear()
            is_time_out(error)
            assert "stopped (SIGSTOP)" in error["text"], error
        os.kill(ranks[WRONG].child.pid, signal.SIGCONT)
        ranks[WRONG].hear()


def is_time_out(error):
    """An error that names who did not come, and whose time was up."""
    assert "TimeoutError" in error["class"], error
    assert error["rank"] == WRONG and error["ranks"] == [WRONG], error
    assert f"rank {WRONG} (host" in error["text"] and "pid" in error["text"], error
    assert "the time-out is that of the group" in error["text"], error
    assert error["lines"] == 1, error


ENDS = {
    "raising": "raised ValueError: the loss is not a number",
    "exiting": "exited with 3",
    "returning": "left",
    "killed": "was killed by SIGKILL",
}


@pytest.mark.parametrize("program", ENDS)
def test_a_rank_that_ends(pool, world, program):
    with pool.run(program, world) as ranks:
        pid = ranks[WRONG].child.pid
        assert ranks[WRONG].hear() is None
        for rank in others(world):
            error = ranks[rank].hear()
            text = error["text"]
            assert f"rank {WRONG} (host" in text and f"pid {pid})" in text and ENDS[program] in text, error
            assert "second line" not in text and error["lines"] == 1, error
            assert error["rank"] == WRONG, error
            assert "PeerError" in error["class"], error
