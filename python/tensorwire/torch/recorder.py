"""torch's flight recorder with the ends and durations of our operations.

Since torch 2.14 its recorder sees every operation of the backend when it is called, but a backend written in Python
cannot tell it when one is over: all entries stay "scheduled". Our works know, so the record is completed from them.
torch's own tools (torchfrtrace, torch.distributed.flight_recorder) read the result.
"""

import bisect
import os
import pickle
from pathlib import Path
from typing import Any

from torch import distributed
from torch._C import _distributed_c10d as c10d

from tensorwire.torch import errors
from tensorwire.torch.operations import Operations, known

NAME = "tensorwire"

#: The ranks of the world that this process has had, the last one at the end, and the name of the recorder of each.
_recorders: dict[int, str] = {}


def recorder_of(global_rank: int) -> str:
    """The name of torch's recorder for this process as a rank of the world.

    torch has a recorder for each backend, by its name, and names the files of a recorder after the rank. When a process
    leaves its group and enters another one as another rank, files of both do not belong together, and torch warns that
    they "will disagree". So each rank that a process has had has a recorder of its own.
    """
    name = _recorders.pop(global_rank, None) or (f"{NAME}-rank-{global_rank}" if _recorders else NAME)
    _recorders[global_rank] = name
    return name


def flight_record() -> dict[str, Any]:
    """The record of this process's operations as its current rank, in the format of torch's recorder."""
    name = next(reversed(_recorders.values()), NAME)
    try:
        record = pickle.loads(c10d._dump_fr_trace(backend=name))
    except (AttributeError, TypeError) as error:
        text = "flight_record: torch records the operations of every backend only since 2.14; update torch"
        raise errors.unsupported(text) from error
    for entry in record.get("entries", ()):
        entry.setdefault("duration_ms", None)
        entry["profiling_name"] = NAME + entry["profiling_name"].removeprefix(name)
    for operations in known():
        own = [entry for entry in record.get("entries", ()) if entry["process_group"][0] == operations.torch_name]
        _complete(own, operations)
    return record


def dump_flight_record(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes the record of this process. Without a path: where torch writes its own, with the rank behind the name."""
    if path is None:
        default = Path.home() / ".cache" / "torch" / "comm_lib_trace_rank_"
        prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        path = f"{prefix or default}{distributed.get_rank()}"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(flight_record()))
    return path


def _complete(entries: list[dict[str, Any]], operations: Operations) -> None:
    """Each flight belongs to the last entry that was made before it, on its way to us."""
    entries.sort(key=lambda entry: entry["time_created_ns"])
    times = [entry["time_created_ns"] for entry in entries]
    for called, flight in list(operations.recent or ()):
        at = bisect.bisect_right(times, called) - 1
        if at >= 0:
            _fill(entries[at], called, flight)


def _fill(entry: dict[str, Any], called: int, flight: Any) -> None:
    duration = flight.duration
    if duration is None or flight._has_failed():
        entry["state"] = "started"
        entry["time_discovered_started_ns"] = called
        entry["retired"] = flight.done()
        return
    entry["state"] = "completed"
    entry["retired"] = True
    entry["duration_ms"] = duration * 1e3
    entry["time_discovered_started_ns"] = called
    entry["time_discovered_completed_ns"] = called + round(duration * 1e9)
