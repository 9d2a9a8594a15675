"""The profiler, the flight recorder, and torch's checks, with the backend."""

import pickle
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire.torch  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@on_ranks
def test_the_profiler_sees_operations(rank, size):
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        dist.all_gather([torch.empty(5) for _ in range(size)], torch.ones(5))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
    events = {}
    for event in profile.function_events:
        if event.name.startswith("tensorwire:"):
            events.setdefault(event.name.removeprefix("tensorwire:"), []).append(event)
            assert event.is_async and event.cpu_time >= 0
    assert [event.input_shapes for event in events["all_reduce"]] == [[[3, 4]], [[2]]]
    assert [event.input_shapes for event in events["all_gather"]] == [[[5]]]
    assert len(events["barrier"]) == 1
    assert len(events["send" if rank == 0 else "recv"]) == 1


@on_ranks
def test_the_profiler_sees_refused_operations_end(rank, size):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG)
    assert any(event.name == "tensorwire:all_reduce" for event in profile.events())
    dist.barrier()


def test_a_profile_holds_nobody_until_the_gpu_is_done():
    from tensorwire.torch.work import Work

    class Flight:
        name, source, duration, gpu = "all_reduce", None, None, 0

        def wait(self, timeout=None):
            pass

    class Span:
        def __init__(self):
            self.over, self.waited = self, 0

        def wait(self, timeout):
            self.waited += 1

    work = Work(Flight(), [], 1)
    work.span = Span()
    assert work.wait() and work.span.waited == 0
    # On the CPU it is over, and its span ends now.
    work._flight.gpu = None
    assert work.wait() and work.span.waited == 1


@on_ranks
def test_emit_nvtx_gets_ranges(rank, size):
    """There is no NVTX here: somebody else stands in for it, and for the profiler that emit_nvtx() starts."""
    from tensorwire.torch import profile

    class Nvtx:
        begun, ended = [], []

        def range_start(self, text):
            self.begun.append(text)
            return len(self.begun)

        def range_end(self, number):
            self.ended.append(number)

    group, real, kind = dist.new_group(), torch.cuda.nvtx, profile._kind
    nvtx = Nvtx()
    try:
        torch.cuda.nvtx, profile._kind = nvtx, lambda: profile._NVTX
        with torch.autograd.profiler.profile():
            dist.all_reduce(torch.ones(3), group=group)
            work = dist.broadcast(torch.ones(3), 0, group=group, async_op=True)
            work.wait()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
        dist.all_reduce(torch.ones(3), group=group)
    finally:
        torch.cuda.nvtx, profile._kind = real, kind
    assert nvtx.begun == ["tensorwire:all_reduce", "tensorwire:broadcast", "tensorwire:all_reduce"]
    assert sorted(nvtx.ended) == [1, 2, 3]


@on_ranks
def test_the_flight_recorder_has_durations(rank, size):
    if VERSION < (2, 14):
        with pytest.raises(tensorwire.UnsupportedError, match="update torch"):
            tensorwire.torch.flight_record()
        return
    group = dist.new_group()
    group._enable_collectives_timing()
    dist.all_reduce(torch.ones(1000), group=group)
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(3)]
    [work.wait() for work in works]
    dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2), group=group)
    if rank == 0:
        dist.send(torch.ones(7), 1, group=group)
        pending = dist.barrier(group=group, async_op=True)
    else:
        dist.recv(torch.ones(7), 0, group=group)
    entries = [
        entry for entry in tensorwire.torch.flight_record()["entries"] if entry["process_group"][0] == group.group_name
    ]
    over = [entry for entry in entries if entry["state"] == "completed"]
    assert len(over) == 6
    assert all(entry["duration_ms"] > 0 and entry["time_discovered_completed_ns"] for entry in over)
    assert [entry["profiling_name"] for entry in over[:4]] == ["tensorwire:all_reduce"] * 4
    assert [entry["duration_ms"] for entry in over[1:4]] == pytest.approx([work._get_duration() for work in works])
    if rank == 0:
        assert entries[-1]["state"] == "started" and not entries[-1]["retired"]
        dist.barrier()
        pending.wait()
    else:
        dist.barrier()
        dist.barrier(group=group)


@on_ranks
def test_torchs_analyzer_reads_the_record(rank, size):
    if VERSION < (2, 14):
        return
    dist.all_reduce(torch.ones(3))
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    path = tensorwire.torch.dump_flight_record(Path(folders[0]) / f"trace_{rank}")
    assert pickle.loads(path.read_bytes())["entries"]
    dist.barrier()
    if rank == 0:
        analyzer, out = "torch.distributed.flight_recorder.fr_trace", Path(folders[0]) / "out"
        command = [sys.executable, "-m", analyzer, folders[0], "-p", "trace_", "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0 and out.exists(), done.stderr
    dist.barrier()


DETAIL = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def run(rank, path):
        dist.init_process_group("tensorwire", init_method="file://" + path, rank=rank, world_size=2)
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert work.is_completed() and tensor.tolist() == [2, 2, 2]
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except RuntimeError as error:
            print(f"rank {rank}:", error, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(run, (sys.argv[1],), nprocs=2)
"""


def test_with_torchs_detailed_checks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DETAIL))
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "rank 0:" in done.stdout and "rank 1:" in done.stdout
    if VERSION >= (2, 14):
        assert "Detected mismatch" in done.stdout


ANOTHER_RANK = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import tensorwire.torch

    def live(rank, backend, path):
        dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, group=dist.new_group([0, 1]))
        assert dist.get_backend_config().endswith("tensorwire"), dist.get_backend_config()
        if hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"):
            record = tensorwire.torch.flight_record()
            names = [entry["profiling_name"] for entry in record["entries"]]
            # At once: the other rank writes to the same pipe.
            os.write(1, " ".join(["rank", str(rank), *(name for name in names if "barrier" not in name), "\\n"]).encode())
        dist.destroy_process_group()

    def run(rank, backend, path):
        live(rank, backend, path + "1")
        live(1 - rank, backend, path + "2")
        live(rank, backend, path + "3")

    if __name__ == "__main__":
        mp.spawn(run, sys.argv[1:], nprocs=2)
"""


@pytest.mark.parametrize("backend", ["tensorwire", "cpu:tensorwire"])
def test_a_process_that_becomes_another_rank_is_no_trouble_to_the_recorder(backend, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ANOTHER_RANK))
    command = [sys.executable, str(script), backend, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    # With Gloo there is no such line either.
    assert "FlightRecorderHook" not in done.stderr
    if VERSION >= (2, 14):
        # The second life has a record of its own; the third goes on with that of the first, as it is the same rank.
        life = ["tensorwire:all_reduce", "tensorwire:broadcast"]
        wanted = [f"rank {rank} {' '.join(life * lives)}" for rank in (0, 1) for lives in (1, 1, 2)]
        assert sorted(line.strip() for line in done.stdout.splitlines()) == sorted(wanted)
