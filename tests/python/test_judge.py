"""How PyTorch's own tests are judged: tests/python/judge/run.py."""

import sys
from pathlib import Path

import pytest

FAULTS = {"test_known": "torch is wrong"}
BOTH = ["tensorwire", "gloo"]


@pytest.fixture(scope="module")
def run():
    folder = str(Path(__file__).parent / "judge")
    sys.path.insert(0, folder)
    try:
        import run
    finally:
        sys.path.remove(folder)
        sys.modules.pop("run", None)
    return run


def results(test, ours, gloos, reasons=("E: why", "E: why")):
    made = []
    for backend, outcome, reason in zip(BOTH, (ours, gloos), reasons):
        made.append({"backend": backend, "test": test, "outcome": outcome})
        if outcome != "passed":
            made[-1]["reason"] = reason
    return made


def problems(run, found, backends=BOTH):
    run.mark_faults(found, FAULTS)
    return run.verdict(found, backends)


def test_a_known_fault_of_torch_is_no_problem(run):
    found = results("test_known", "failed", "failed")
    assert problems(run, found) == []
    assert [result["fault"] for result in found] == ["torch is wrong"] * 2


@pytest.mark.parametrize(
    "found",
    [
        results("test_other", "failed", "failed"),
        results("test_known", "failed", "passed"),
        results("test_known", "failed", "skipped"),
        results("test_known", "failed", "failed", ("E: why", "E: something else")),
    ],
    ids=["nobody knows why", "passes with Gloo", "is not run with Gloo", "fails otherwise"],
)
def test_any_other_failure_is_one(run, found):
    assert problems(run, found)[0] == f"{found[0]['test']} failed"


def test_a_known_fault_needs_gloo_to_say_so(run):
    found = results("test_known", "failed", "failed")[:1]
    assert problems(run, found, BOTH[:1]) == ["test_known failed"]


def test_what_gloo_passes_must_be_passed(run):
    assert problems(run, results("test_any", "passed", "passed")) == []
    assert problems(run, results("test_any", "passed", "failed")) == []
    assert problems(run, results("test_known", "skipped", "passed"))[0].startswith("test_known passes with Gloo")
    assert len(problems(run, results("test_any", "skipped", "failed"))) == 1


def on_gpu(run, ours, gloos, count=100):
    found = results("test_any", ours, gloos)
    many = [{"backend": "tensorwire", "test": f"test_{n}", "outcome": "passed", "gpu_bytes": [0, 8]} for n in range(count)]
    return run.verdict_of_gpu(found + many, BOTH)


def test_on_a_gpu_gloo_decides_what_may_fail(run):
    assert on_gpu(run, "passed", "failed") == []
    assert on_gpu(run, "failed", "failed") == []
    assert on_gpu(run, "failed", "passed") == ["test_any failed: E: why"]
    assert on_gpu(run, "failed", "skipped") == ["test_any failed: E: why"]
    assert on_gpu(run, "skipped", "passed")[0].startswith("test_any passes with Gloo")


def test_on_a_gpu_tensors_must_have_been_there(run):
    assert on_gpu(run, "passed", "passed", 99) == ["99 tests had tensors on the GPU, 100 must have"]
