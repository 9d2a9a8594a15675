"""One test in a process of its own, which leads a session: what is left of that session in the end is killed."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path

import gpus
import pretend
import rpc
import suite as core
import torch
from ranks import die_with_parent
from torch.testing._internal.common_distributed import TEST_SKIPS


# A rank died of an exception outside the body, of which its parent hears nothing.
NOT_TOLD = "in the log"


class Case:
    """A test that is running."""

    def __init__(self, suite, test: str, backend: str, seconds: float, log: Path):
        self.test, self.backend, self.seconds = test, backend, seconds
        self.begin = time.monotonic()
        self.said = b""
        sys.stdout.flush()
        self.pipe, write = os.pipe()
        self.leader = os.fork()
        if self.leader == 0:
            lead(suite, test, backend, log, write)
        os.close(write)

    def fileno(self) -> int:
        return self.pipe

    def time_left(self) -> float:
        return max(0.0, self.begin + self.seconds - time.monotonic())

    def read(self) -> bool:
        """Takes in what the process wrote; whether that was all."""
        part = os.read(self.pipe, 1 << 16)
        self.said += part
        return not part or self.said.endswith(b"\n")

    def finish(self) -> dict:
        """Ends what still runs, and says how the test ended."""
        os.close(self.pipe)
        if self.said.endswith(b"\n"):
            wait_until(self.leader, time.monotonic() + 5)
        left = end_session(self.leader)
        if self.said.endswith(b"\n"):
            result = json.loads(self.said)
        else:
            reason = "its process died" if self.time_left() else f"killed after {self.seconds:.0f} s"
            result = {"outcome": "failed", "reason": reason}
        if left and result["outcome"] == "passed":
            result |= {"outcome": "failed", "reason": f"{left} processes were left behind"}
        about = {"test": self.test, "backend": self.backend, "torch": torch.__version__.partition("+")[0]}
        about["gpu_is_cpu"] = self.test in gpus.tests and not core.on_gpu
        if core.on_gpu:
            about["on_gpu"] = True
        return about | result | {"seconds": round(time.monotonic() - self.begin, 2)}


def wait_until(pid: int, deadline: float) -> None:
    """Waits for the end of a process, and leaves it to be reaped, so that its number stays its own."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < deadline:
        time.sleep(0.01)


def end_session(leader: int) -> int:
    """Kills and reaps all processes of a session; how many ran besides its leader."""
    found: set[int] = set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        running = [pid for pid in session(leader) if pid != leader]
        found.update(running)
        for pid in [leader, *running]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not running:
            break
        time.sleep(0.02)
    os.waitpid(leader, 0)
    for pid in found:  # they became ours when their parent died: see the subreaper in run.py
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
    return len(found)


def session(leader: int) -> list[int]:
    """The running processes of a session."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        state, _parent, _group, sid = stat.rpartition(")")[2].split()[:4]
        if int(sid) == leader and state not in "ZX":
            found.append(int(entry))
    return found


def lead(suite, test: str, backend: str, log: Path, pipe: int) -> None:
    """What the process of a test does: never returns."""
    try:
        die_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        with tempfile.TemporaryDirectory(prefix="torch-tests-") as folder:
            result = judge(suite, test, backend, Path(folder))
        if result.get("reason") == TEST_SKIPS["generic"].message:
            result["reason"] = reason_in(log) or result["reason"]
        elif result.get("reason") == NOT_TOLD:
            result["reason"] = what(log.read_text(errors="replace"))
        os.write(pipe, json.dumps(result).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def judge(suite, test: str, backend: str, proof: Path) -> dict:
    """How the test ended, told by unittest, by every rank's exit status and by every rank's word on its group."""
    group, _, name = test.rpartition(".")
    on_cpu = name in gpus.tests and not core.on_gpu
    if reason := core.not_here(name):
        return {"outcome": "skipped", "how": "gpu", "reason": reason}
    tests = rpc.tests_for(backend, group, proof) if group else core.tests_for(suite, backend, name, proof)
    result = unittest.TestResult()
    unittest.TestSuite([tests(name)]).run(result)
    codes = tests.exit_codes
    about = {"ranks": codes} if codes else {}

    def failed(reason: str) -> dict:
        return {"outcome": "failed", "reason": reason} | about

    if trouble := [*result.failures, *result.errors]:
        text = "\n".join(text for _, text in trouble)
        print(text, file=sys.stderr)
        if on_cpu and (need := pretend.NEEDS_GPU.search(text)):
            return {"outcome": "skipped", "how": "gpu", "reason": need.group()} | about
        return failed(NOT_TOLD if "Expected exit code" in text else what(text))
    if result.skipped:
        if len(set(codes)) > 1:
            return failed(f"only some ranks skipped: exit statuses {codes}")
        how = "ranks" if codes else "decorator"
        return {"outcome": "skipped", "how": how, "reason": result.skipped[0][1]} | about
    if result.testsRun != 1 or result.unexpectedSuccesses or result.expectedFailures:
        return failed("unittest counts no plain success")
    if core.on_gpu:
        about["gpu_bytes"] = [int(rank.read_text()) for rank in sorted(proof.glob("*.bytes"))]
    groups = [rank.read_text() for rank in proof.iterdir() if not rank.suffix]
    # In the tests of RPC one rank may stay out of the group.
    expected = range(len(codes) - 1, len(codes) + 1) if group else (len(codes),)
    if not codes or len(groups) not in expected or len(set(groups)) != 1:
        return failed(f"not every rank ran it: {groups}, {codes}")
    # unittest has seen that of the first rank only.
    if any(codes):
        return failed(f"exit statuses {codes}")
    return {"outcome": "passed", "group": groups[0]} | about


def what(text: str) -> str:
    """The line of an error that says most: the first that begins with the name of an exception, or the last of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    named = [line for line in errors if not line.startswith("RuntimeError: Process ")]
    return (named or errors or lines[-1:] or ["nothing was said"])[0][:300]


def reason_in(log: Path) -> str:
    """Why the ranks skipped the test by an exception: their parent knows only that they did."""
    for line in log.read_text(errors="replace").splitlines():
        _, found, reason = line.partition("for following reason: ")
        if found:
            return reason.strip()
    return ""
