"""Runs PyTorch's own test of torch.distributed against tensorwire and against Gloo, and judges.

    run.py OUT                          all tests for both; results as JSON lines in the folder OUT, and logs there
    run.py OUT --backends gloo          for one only
    run.py OUT --only 'test_all_*'      some tests
    run.py OUT --jobs 2                 so many tests at a time (each has 3 or 4 ranks)

The status is 0 if no test failed with tensorwire and if it passes every test that Gloo passes.
"""

import argparse
import ctypes
import fnmatch
import json
import os
import select
import sys
import time
from collections import Counter
from pathlib import Path
from zlib import crc32

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    arguments = parse()
    begin = time.monotonic()
    logs = arguments.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Several ranks on few cores: more threads in each only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = run_all(arguments, logs)
    mark_faults(results, faults_of_torch())
    path = arguments.out / f"torch-{results[0]['torch']}.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    problems = verdict(results, arguments.backends)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    counts = {}
    for backend in arguments.backends:
        counts[backend] = Counter(result["outcome"] for result in results if result["backend"] == backend)
        print(f"{backend}: {dict(counts[backend])}")
    print(f"results: {path}; logs: {logs}")
    judged = counts[arguments.backends[0]]
    faults = [result["test"] for result in results if result["backend"] == "tensorwire" and "fault" in result]
    for test in faults:
        print(f"FAILS WITH BOTH: {test}, by a fault of torch")
    failed = max(judged["failed"] - len(faults), len(problems))
    # In the form of pytest's last line, so that it is counted in the same way.
    print(f"{judged['passed']} passed, {failed} failed, {judged['skipped']} skipped in {time.monotonic() - begin:.1f}s")
    return 1 if failed or not judged["passed"] else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", nargs="+", default=["tensorwire", "gloo"])
    parser.add_argument("--only", default="*")
    parser.add_argument("--part", default="1/1", help="a fixed part of the tests: 2/3 is the second third")
    parser.add_argument("--jobs", type=int, default=min(4, (os.cpu_count() or 2) + 1))
    parser.add_argument("--limit", type=float, default=660, help="seconds after which a test is killed")
    return parser.parse_args()


def run_all(arguments, logs: Path) -> list[dict]:
    """Runs the chosen tests, several at a time. torch is imported here, once, and never used in this process."""
    import rpc
    import suite as core
    from case import Case

    suite = core.load()
    chosen = fnmatch.filter(core.names(suite) + rpc.names(), arguments.only)
    part, parts = map(int, arguments.part.split("/"))
    chosen = [test for test in chosen if crc32(test.encode()) % parts == part - 1]
    todo = [(test, backend) for backend in arguments.backends for test in chosen]
    if not todo:
        sys.exit(f"no test is named {arguments.only}")
    todo.reverse()
    running: list[Case] = []
    results = []
    while todo or running:
        while todo and len(running) < arguments.jobs:
            test, backend = todo.pop()
            running.append(Case(suite, test, backend, arguments.limit, logs / f"{test}.{backend}.log"))
        ready, _, _ = select.select(running, [], [], min(case.time_left() for case in running))
        for case in list(running):
            if (case in ready and case.read()) or case.time_left() == 0:
                running.remove(case)
                results.append(case.finish())
                show(results[-1])
    return sorted(results, key=lambda result: (result["backend"], result["test"]))


def show(result: dict) -> None:
    start = f"{result['backend']:<10} {result['outcome']:<7} {result['seconds']:6.1f} s"
    print(f"{start}  {result['test']}  {result.get('reason', '')}", flush=True)


def faults_of_torch() -> dict[str, str]:
    import suite as core

    return core.FAULTS_OF_TORCH


def mark_faults(results: list[dict], faults: dict[str, str]) -> None:
    """Writes the known reason into both results of a test that failed with both backends in the same way."""
    failed = {(result["backend"], result["test"]): result for result in results if result["outcome"] == "failed"}
    for test, reason in faults.items():
        both = [failed.get((backend, test)) for backend in ("tensorwire", "gloo")]
        if all(both) and both[0]["reason"] == both[1]["reason"]:
            for result in both:
                result["fault"] = reason


def verdict(results: list[dict], backends: list[str]) -> list[str]:
    """What is not as it must be."""
    outcome = {(result["backend"], result["test"]): result["outcome"] for result in results}
    failed = [result for result in results if (result["backend"], result["outcome"]) == ("tensorwire", "failed")]
    problems = [f"{result['test']} failed" for result in failed if "fault" not in result]
    if {"tensorwire", "gloo"} <= set(backends):
        for (name, test), how in outcome.items():
            ours = outcome.get(("tensorwire", test))
            if (name, how) == ("gloo", "passed") and ours not in ("passed", "failed"):
                problems.append(f"{test} passes with Gloo and is {ours} with tensorwire")
        executed = Counter(name for (name, _), how in outcome.items() if how != "skipped")
        if executed["tensorwire"] < executed["gloo"]:
            problems.append(f"{executed['tensorwire']} tests were executed, with Gloo {executed['gloo']}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
