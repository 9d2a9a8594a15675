"""Another process for tests of leases: it runs functions by name, with arguments that are pickled."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

#: Only there against hanging.
PATIENCE = 100


class Peer:
    """A process that was spawned: call(function, *args) runs a function of a test file there."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.line, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def call(self, function, *args):
        self.line.send((function, args))
        assert self.line.poll(PATIENCE), "no answer"
        well, value = self.line.recv()
        if not well:
            raise value
        return value

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def close(self):
        if self.process.is_alive():
            try:
                self.line.send(None)
            except OSError:
                pass
            self.process.join(30)
        if self.process.is_alive():
            self.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _serve(line):
    # Whatever happens, it ends some day.
    threading.Thread(target=lambda: (time.sleep(600), os._exit(3)), daemon=True).start()
    while (order := line.recv()) is not None:
        function, args = order
        try:
            answer = (True, function(*args))
        except Exception as error:
            answer = (False, error)
        line.send(answer)
        del order, args, answer


#: What functions that run in a peer keep there.
KEPT: dict = {}


def keep(name, token):
    """Opens a token and keeps its tensor."""
    import tensorwire

    KEPT[name] = tensorwire.open(token)


def drop(*names):
    for name in names:
        del KEPT[name]


def listed(name):
    return KEPT[name].tolist()


def write(name, index, value):
    KEPT[name][index] = value


def onward(name):
    """A token for what was opened."""
    import tensorwire

    lease = tensorwire.share(KEPT[name])
    KEPT[f"token {name}"] = lease
    return lease


def until(condition, text="it does not become true"):
    """Waits for it; the limit is only against hanging. The text may be a function that gives it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, text() if callable(text) else text
        time.sleep(0.005)


def fds():
    return len(os.listdir("/proc/self/fd"))


def thread_names():
    """The names of this process's threads, cut as the kernel does; one may end while this looks."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().rstrip("\n"))
        except OSError:
            pass
    return names


def resident():
    """Bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def run(code, **env):
    """A program of its own: its exit code, and what it said."""
    import subprocess

    here = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])} | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return ended.returncode, ended.stdout + ended.stderr
