"""Types: the stubs are true to the module, and a typed program finds in them what it needs."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("mypy")
pytest.importorskip("numpy")

LIMIT = 280

PROGRAM = '''
import asyncio
from array import array
from datetime import timedelta

import numpy as np

import tensorwire
import tensorwire.rpc

group: tensorwire.Group = tensorwire.init("tcp://h:1", rank=0, world=2, timeout=timedelta(seconds=3))
numbers = tensorwire.empty((3, 4), "float64")
work: tensorwire.Work = group.all_reduce(numbers, "max", async_op=True)
work.wait(1.5)
group.all_reduce(np.ones(3), ("premul_sum", 2.0))
group.all_gather([np.ones(3), np.ones(3)], np.ones(3))
group.broadcast(bytearray(4), 0)
group.broadcast(array("d", [1.0]), 0, timeout=timedelta(seconds=1))
group.broadcast(tensorwire.alloc(10), root=0)
part: tensorwire.Group | None = group.split(3)
keys, rows, shape = group.all_reduce_sparse((np.arange(3), np.ones((3, 2)), 10), "max")
started: tensorwire.Work = group.all_reduce_sparse((np.arange(3), np.ones(3)), async_op=True)
where: list[tuple[int, str, int]] = [(member.rank, member.host, member.pid) for member in group.members]
lease: tensorwire.Lease = tensorwire.share(numbers, lifetime=None)
token: tensorwire.Token = lease.token
holders: list[int] = lease.holders()
lease.reclaim(timedelta(seconds=1))
work.on_done(lambda done: print(done.name))
listener: tensorwire.Listener = tensorwire.Listener("tcp://h:1")
pipe: tensorwire.Pipe = listener.accept(timedelta(seconds=1))
sent: tensorwire.Work = pipe.send(numbers, np.ones(3), metadata=b"x", payloads=[b"y"], async_op=True)
message = pipe.recv(1.5, into=[numbers])
size: int = 0 if message is None else len(message.metadata)
coming: tensorwire.pipe.Receiving = pipe.recv(async_op=True)


def add(call: tensorwire.rpc.Call) -> tensorwire.rpc.Answer:
    return tensorwire.rpc.Answer(call.read(timeout=call.left).tensors[0], metadata=call.metadata)


rpc = tensorwire.rpc.Rpc(pipe, {"add": add}, threads=2)
size += len(rpc.call("add", numbers, into=[numbers]).metadata)
answer: tensorwire.rpc.Answering = rpc.call("add", numbers, async_op=True)
size += len(answer.wait(1.5).metadata)


async def wait() -> None:
    await work
    came = await coming
    print(b"" if came is None else came.metadata, (await answer).metadata)


asyncio.run(wait())
try:
    group.check()
except tensorwire.PeerDiedError as error:
    rank: int | None = error.rank
    kind: str = error.kind

# What is wrong is found: an unused ignore would be an error.
group.all_reduce(3)  # type: ignore[arg-type]
group.all_reduce(numbers, "mean")  # type: ignore[arg-type]
group.rank = 3  # type: ignore[misc]
pipe.send(metadata="x")  # type: ignore[arg-type]
'''


def test_typed_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    check("mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program))


def test_package_itself(tmp_path):
    modules = ("errors", "default_group", "numpy", "sparse", "symmetric", "pipe", "rpc", "__main__")
    packages = [word for module in modules for word in ("-m", f"tensorwire.{module}")]
    check("mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), *packages, cwd=tmp_path)


# What stubtest cannot know. The default of `op`, which native code does not spell out; the buffer protocol, which
# classes show from Python 3.12 on.
UNKNOWN = r"""
tensorwire\._native\.Memory\.__buffer__
"""


def test_stubs_are_true(tmp_path):
    (tmp_path / "unknown").write_text(UNKNOWN)
    options = ("--allowlist", "unknown", "--ignore-unused-allowlist", "--ignore-disjoint-bases", "--concise")
    check("mypy.stubtest", "tensorwire._native", *options, cwd=tmp_path)


def check(tool, *args, **options):
    environment = os.environ | {"MYPY_FORCE_COLOR": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", tool, *args], capture_output=True, text=True, timeout=LIMIT, env=environment, **options
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
