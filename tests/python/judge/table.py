"""Writes what run.py found into docs/torch-tests.md, between the two marks there.

    table.py docs/torch-tests.md RESULTS.jsonl...
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
BACKENDS = ("tensorwire", "gloo")


def main(doc: Path, files: list[Path]) -> None:
    parts = [section(read(path)) for path in files]
    text = doc.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    doc.write_text(before + BEGIN + "\n\n" + "\n".join(parts) + "\n" + END + after)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def section(results: list[dict]) -> str:
    """Everything about one version of torch."""
    version = results[0]["torch"]
    by_test: dict[str, dict[str, dict]] = defaultdict(dict)
    for result in results:
        by_test[result["test"]][result["backend"]] = result
    lines = [f"### torch {version}", "", *totals(by_test), "", *differences(by_test), ""]
    lines += [f"Not executed, {len(not_executed(by_test))} tests:", "", *reasons(by_test), ""]
    lines += ["Passed by tensorwire:", "", *wrapped(passed(by_test)), ""]
    return "\n".join(lines)


def totals(by_test) -> list[str]:
    rows = ["| | tests | executed | passed | failed | skipped |", "|---|---|---|---|---|---|"]
    for backend in BACKENDS:
        outcomes = [found[backend]["outcome"] for found in by_test.values() if backend in found]
        passed, failed, skipped = (outcomes.count(outcome) for outcome in ("passed", "failed", "skipped"))
        rows.append(f"| {title(backend)} | {len(outcomes)} | {passed + failed} | {passed} | {failed} | {skipped} |")
    return rows


def differences(by_test) -> list[str]:
    """Tests that end differently for the two, in one row each."""
    rows = []
    for test, found in sorted(by_test.items()):
        ours, theirs = (found.get(backend, {"outcome": "not run"}) for backend in BACKENDS)
        if ours["outcome"] != theirs["outcome"]:
            rows.append(f"| `{test}` | {said(ours)} | {said(theirs)} |")
    if not rows:
        return ["No test ends differently for the two."]
    return ["| What differs | tensorwire | Gloo |", "|---|---|---|", *rows]


def said(result: dict) -> str:
    reason = result.get("reason", "")
    return result["outcome"] + (": " + plain(reason)[:160] if reason else "")


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def not_executed(by_test) -> list[str]:
    return [test for test, found in by_test.items() if ours(found).get("outcome") == "skipped"]


def reasons(by_test) -> list[str]:
    """Skipped tests, by reason: those that need the same thing in one row."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test in sorted(not_executed(by_test)):
        result = ours(by_test[test])
        groups[result["reason"], result["how"]].append(test)
    rows = ["| Reason | skipped by | tests |", "|---|---|---|"]
    for (reason, how), tests in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        names = ", ".join(f"`{test.removeprefix('test_')}`" for test in tests)
        who = "every rank, after it joined the group" if how == "ranks" else "a decorator"
        rows.append(f"| {plain(reason)} | {who} | {len(tests)}: {names} |")
    return rows


def passed(by_test) -> list[str]:
    return sorted(test for test, found in by_test.items() if ours(found).get("outcome") == "passed")


def wrapped(tests: list[str]) -> list[str]:
    return [", ".join(f"`{test.removeprefix('test_')}`" for test in tests) + "."] if tests else ["None."]


def ours(found: dict) -> dict:
    return found.get("tensorwire") or found["gloo"]


def title(backend: str) -> str:
    return "Gloo" if backend == "gloo" else backend


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
