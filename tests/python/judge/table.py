"""Writes what run.py found into docs/torch-tests.md, between the two marks there.

    table.py docs/torch-tests.md RESULTS.jsonl...
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
BACKENDS = {"tensorwire": "tensorwire", "gloo": "Gloo"}
PARTS = (
    "`distributed_test`, tests for the CPU or any device",
    "`distributed_test`, tests that ask for GPUs, run with CPU tensors",
    "RPC with a group beside it",
    "`distributed_test`, tests that ask for GPUs, on one GPU",
)
HOW = {
    "decorator": "a decorator",
    "ranks": "every rank, once in the group",
    "gpu": "its error",
}


def main(doc: Path, files: list[Path]) -> None:
    sections = [section(json.loads(line) for line in path.read_text().splitlines()) for path in files]
    before, rest = doc.read_text().split(BEGIN)
    _, after = rest.split(END)
    doc.write_text(before + BEGIN + "\n\n" + "\n".join(sections) + "\n" + END + after)


def section(results) -> str:
    """Everything about one version of torch."""
    tests: dict[str, dict[str, dict]] = defaultdict(dict)
    for result in results:
        tests[result["test"]][result["backend"]] = result
        version = result["torch"] + (", on one GPU" if "on_gpu" in result else "")
    tests = dict(sorted(tests.items()))
    lines = [f"### torch {version}", "", *totals(tests), "", *differences(tests), "", *faults(tests)]
    lines += ["Not executed:", "", *reasons(tests), ""]
    lines += ["<details><summary>Passed by tensorwire</summary>", "", *passed(tests), "", "</details>", ""]
    return "\n".join(lines)


def totals(tests: dict) -> list[str]:
    rows = ["| | backend | tests | executed | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    parts = {part_of(result) for found in tests.values() for result in found.values()}
    for part in (*PARTS, "all") if len(parts) > 1 else parts:
        for backend, name in BACKENDS.items():
            results = [found[backend] for found in tests.values() if backend in found]
            outcomes = [result["outcome"] for result in results if part in ("all", part_of(result))]
            if outcomes:
                passed, failed, skipped = map(outcomes.count, ("passed", "failed", "skipped"))
                counts = f"{len(outcomes)} | {passed + failed} | {passed} | {failed} | {skipped}"
                rows.append(f"| {part} | {name} | {counts} |")
    return rows


def part_of(result: dict) -> str:
    if "on_gpu" in result:
        return PARTS[3]
    return PARTS[2] if "." in result["test"] else PARTS[result["gpu_is_cpu"]]


def differences(tests: dict) -> list[str]:
    """Tests that end differently for the two."""
    rows = []
    for test, found in tests.items():
        both = [found.get(backend, {"outcome": "not run"}) for backend in BACKENDS]
        if both[0]["outcome"] != both[1]["outcome"]:
            rows.append(f"| `{short(test)}` | {said(both[0])} | {said(both[1])} |")
    if not rows:
        return ["No test ends differently for the two."]
    return ["| What differs | tensorwire | Gloo |", "|---|---|---|", *rows]


def faults(tests: dict) -> list[str]:
    """Tests that fail with both by a fault of torch's own."""
    rows = []
    for test, found in tests.items():
        if "fault" in ours(found):
            rows.append(f"| `{short(test)}` | {said(ours(found))} | {plain(ours(found)['fault'])} |")
    return ["| Fails with both | how | why |", "|---|---|---|", *rows, ""] if rows else []


def said(result: dict) -> str:
    reason = plain(result.get("reason", ""))
    return result["outcome"] + (f": {reason[:160]}" if reason else "")


def reasons(tests: dict) -> list[str]:
    """Skipped tests, those with the same reason in one row."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test, found in tests.items():
        result = ours(found)
        if result["outcome"] == "skipped":
            groups[plain(result["reason"]), HOW[result["how"]]].append(f"`{short(test)}`")
    rows = ["| Reason | skipped by | tests |", "|---|---|---|"]
    for (reason, how), names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        rows.append(f"| {reason} | {how} | {len(names)}: {', '.join(names)} |")
    return rows


def passed(tests: dict) -> list[str]:
    return [", ".join(f"`{short(test)}`" for test, found in tests.items() if ours(found)["outcome"] == "passed") + "."]


def ours(found: dict) -> dict:
    return found.get("tensorwire") or found["gloo"]


def short(test: str) -> str:
    group, _, name = test.rpartition(".")
    return ".".join(filter(None, (group, name.removeprefix("test_"))))


def plain(text: str) -> str:
    """Without what differs from run to run: ports, pids, addresses and paths."""
    text = re.sub(r"\[enforce fail at \S+\] ", "", re.sub(r"\s+", " ", text))
    text = re.sub(r"\[[\d.]+\]:\d+\$\d+", "[...]", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
