"""Runs PyTorch's own test of torch.distributed against tensorwire and against Gloo, and judges.

    run.py OUT                          all tests for both; results as JSON lines in the folder OUT, and logs there
    run.py OUT --backends gloo          for one only
    run.py OUT --only 'test_all_*'      some tests
    run.py OUT --jobs 2                 so many tests at a time (each has 3 or 4 ranks)
    run.py OUT --gpu                    the tests that ask for GPUs, on one GPU that all ranks share

The status is 0 if no test failed with tensorwire and if it passes every test that Gloo passes. On a GPU, a test may fail
that fails with Gloo as well, and at least 100 tests must have been executed with tensors on the GPU.
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
    if arguments.gpu:
        import one_gpu

        one_gpu.count_gpus()
    logs = arguments.out / ("logs-gpu" if arguments.gpu else "logs")
    logs.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Several ranks on few cores: more threads in each only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = run_all(arguments, logs)
    mark_faults(results, faults_of_torch())
    path = arguments.out / f"torch-{results[0]['torch']}{'-gpu' if arguments.gpu else ''}.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    problems = (verdict_of_gpu if arguments.gpu else verdict)(results, arguments.backends)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    counts = {}
    for backend in arguments.backends:
        counts[backend] = Counter(result["outcome"] for result in results if result["backend"] == backend)
        print(f"{backend}: {dict(counts[backend])}")
    print(f"results: {path}; logs: {logs}")
    judged = counts[arguments.backends[0]]
    faults = [result for result in results if result["backend"] == "tensorwire" and "fault" in result]
    for result in faults:
        print(f"FAILS WITH BOTH: {result['test']}: {result['reason']}; {result['fault']}")
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
    parser.add_argument("--gpu", action="store_true", help="the tests that ask for GPUs, on one GPU")
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which no test is begun any more")
    return parser.parse_args()


def run_all(arguments, logs: Path) -> list[dict]:
    """Runs the chosen tests, several at a time. torch is imported here, once, and never used in this process."""
    import rpc
    import suite as core
    from case import Case

    suite = core.load(arguments.gpu)
    chosen = fnmatch.filter(core.names(suite) + ([] if arguments.gpu else rpc.names()), arguments.only)
    part, parts = map(int, arguments.part.split("/"))
    chosen = [test for test in chosen if crc32(test.encode()) % parts == part - 1]
    todo = [(test, backend) for backend in arguments.backends for test in chosen]
    if arguments.gpu:
        # A GPU is lent for minutes: what it has executed by then was executed for all backends. The longest begin first.
        chosen.sort(key=lambda test: test not in core.LONG)
        todo = [(test, backend) for test in chosen for backend in arguments.backends]
    if not todo:
        sys.exit(f"no test is named {arguments.only}")
    todo.reverse()
    end = time.monotonic() + arguments.within
    running: list[Case] = []
    results = []
    while todo or running:
        if time.monotonic() > end and todo:
            print(f"NOT BEGUN: {len(todo)} after {arguments.within:.0f} s", flush=True)
            todo.clear()
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


#: So many tests must have been executed with tensors on the GPU.
LEAST_ON_GPU = 100


def verdict_of_gpu(results: list[dict], backends: list[str]) -> list[str]:
    """What is not as it must be, where GPUs were asked for and there was one. Notes what fails with all backends."""
    outcome = {(result["backend"], result["test"]): result for result in results}
    others = [backend for backend in backends if backend != "tensorwire"]
    problems = []
    for result in results:
        if result["backend"] != "tensorwire":
            continue
        theirs = [outcome.get((backend, result["test"]), {"outcome": "not run"}) for backend in others]
        if result["outcome"] == "failed" and theirs and all(their["outcome"] == "failed" for their in theirs):
            same = theirs[0]["reason"] == result["reason"]
            result.setdefault("fault", f"{others[0]}: " + ("the same" if same else theirs[0]["reason"]))
        elif result["outcome"] == "failed":
            problems.append(f"{result['test']} failed: {result['reason']}")
        elif result["outcome"] != "passed" and any(their["outcome"] == "passed" for their in theirs):
            problems.append(f"{result['test']} passes with Gloo and is {result['outcome']} with tensorwire")
    on_gpu = [result for result in results if result["backend"] == "tensorwire" and any(result.get("gpu_bytes", []))]
    print(f"{len(on_gpu)} tests passed with tensors of tensorwire's on the GPU")
    if "tensorwire" in backends and len(on_gpu) < LEAST_ON_GPU:
        problems.append(f"{len(on_gpu)} tests had tensors on the GPU, {LEAST_ON_GPU} must have")
    return problems


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
