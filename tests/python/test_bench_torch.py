"""`tensorwire bench` through torch, on both sides."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

OPS = "all-reduce reduce broadcast all-gather gather scatter reduce-scatter all-to-all send-recv barrier".split()


def bench(*words: str) -> tuple[list[dict], str]:
    """The rows that a bench printed, and what it said beside them."""
    command = [sys.executable, "-m", "tensorwire", "bench", *words]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    if "--json" not in words:
        return [], ended.stdout
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr


def test_both_sides_run_every_operation_through_torch():
    rows, said = bench(
        *["-n", "2", "--sizes", "1K,100K", "--through", "torch", "--against", "gloo", "--bind", "ours"],
        *["--seconds", "0.01", "--json"],
    )
    assert "left out" not in said, said
    for op in OPS:
        of_op = [row for row in rows if row["op"] == op]
        peers = {row["peer"] for row in of_op}
        assert peers == {"tensorwire", "gloo"}, f"{op}: {peers}"
    for row in rows:
        assert row["wrong"] == 0 and row["median_us"] > 0, row
        assert row["through"] == "torch", row
        assert row["bound"] == (row["peer"] != "gloo"), row
        assert len(row["caveats"]) == (row["peer"] == "gloo"), row
    ways = {row["path"] for row in rows if row["op"] == "all-reduce" and row["peer"] == "tensorwire"}
    assert ways and ways <= {"inline", "one-shot", "staged", "direct"}, ways


def test_a_comparison_with_gloo_is_fair_by_default():
    rows, said = bench("all-reduce", "-n", "2", "--sizes", "1K,64K", "--against", "gloo", "--seconds", "0.01", "--json")
    assert "left out" not in said, said
    for row in rows:
        assert (row["through"], row["bound"], row["caveats"]) == ("torch", False, []), row
    ours = {row["bytes"]: row["median_us"] for row in rows if row["peer"] == "tensorwire"}
    gloo = [row for row in rows if row["peer"] == "gloo"]
    assert sorted(ours) == sorted(row["bytes"] for row in gloo) == [1 << 10, 1 << 16]
    for row in gloo:
        assert row["ratio"] == pytest.approx(row["median_us"] / ours[row["bytes"]]), row
    assert all(row["ratio"] is None for row in rows if row["peer"] != "gloo")


def test_what_is_not_fair_is_said_beside_the_ratio(tmp_path):
    page = tmp_path / "page.html"
    raw = ["all-reduce", "-n", "2", "--sizes", "1K,64K", "--against", "gloo", "--through", "native"]
    raw += ["--bind", "all", "--seconds", "0.01"]
    said = ["gloo is called from Python, tensorwire from Rust.", "Each rank of gloo is bound to one core,"]
    rows, _ = bench(*raw, "--json")
    ours = [row for row in rows if row["peer"] != "gloo"]
    gloo = [row for row in rows if row["peer"] == "gloo"]
    assert gloo and all(row["through"] == "native" and row["bound"] and not row["caveats"] for row in ours)
    for row in gloo:
        assert row["through"] == "torch" and row["bound"] and len(row["caveats"]) == 2, row
        assert all(caveat.startswith(text) for caveat, text in zip(row["caveats"], said, strict=True)), row
    _, table = bench(*raw, "--html", str(page))
    lines = table.splitlines()
    assert all(len(line) <= 80 for line in lines), table
    last = max(index for index, line in enumerate(lines) if line.endswith("x"))
    assert lines[last + 1].startswith(f"  ratio: {said[0]}"), table
    html = page.read_text()
    # The summary and the figures.
    assert all(html.count(f'<p class="caveat">{text}') == 2 for text in said), html


def test_the_page_has_the_command_once(tmp_path):
    page = tmp_path / "page.html"
    words = ["barrier", "-n", "2", "--seconds", "0.01", "--html", str(page)]
    bench(*words)
    html = page.read_text()
    assert f"<dd>tensorwire bench {' '.join(words)}</dd>" in html, html
    assert "-m tensorwire" not in html, html


def test_without_our_package_gloo_is_left_out_with_the_way_on(tmp_path):
    (tmp_path / "tensorwire").mkdir()
    (tmp_path / "tensorwire" / "__init__.py").write_text("raise ImportError('not today')\n")
    # The command itself is started without it: only ranks find the broken package.
    launcher = tmp_path / "python"
    settings = f'TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH="{tmp_path}"'
    launcher.write_text(f'#!/bin/sh\n{settings} exec "{sys.executable}" "$@"\n')
    launcher.chmod(0o755)
    command = [sys.executable, "-m", "tensorwire", "bench", "barrier", "-n", "2", "--against", "gloo"]
    command += ["--seconds", "0.01", "--json"]
    environment = {**os.environ, "PYTHON": str(launcher)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert "gloo is left out: tensorwire cannot be imported: not today" in ended.stderr, ended.stderr
    assert "--through native measures it beside calls from Rust" in ended.stderr, ended.stderr
    assert {json.loads(line)["peer"] for line in ended.stdout.splitlines()} == {"tensorwire", "memcpy"}


def test_shared_memory_is_reached_through_torch():
    rows, _ = bench(
        *["all-reduce", "-n", "2", "--sizes", "1M", "--memory", "shared", "--through", "torch"],
        *["--dtype", "bfloat16", "--op", "max", "--seconds", "0.01", "--json"],
    )
    (ours,) = [row for row in rows if row["peer"] == "tensorwire"]
    assert (ours["memory"], ours["path"], ours["wrong"]) == ("shared", "direct", 0)


@pytest.mark.parametrize("view", [[], ["--bucket-view"]])
def test_a_step_of_ddp_is_measured(view):
    rows, _ = bench("ddp", "-n", "2", "--size", "1M", "--seconds", "0.05", "--json", *view)
    seen = [(row["peer"], row["memory"]) for row in rows]
    assert seen == [("tensorwire", "private"), ("tensorwire", "shared"), ("gloo", "private")]
    for row in rows:
        assert row["wrong"] == 0 and row["steps"] >= 6, row
        assert 0 < min(row["alone_us"], row["empty_us"], row["step_us"]), row
        for name, less in (("extra", "alone_us"), ("communication", "empty_us")):
            ours, gloo = row[f"{name}_us"], rows[2][f"{name}_us"]
            assert ours == pytest.approx(row["step_us"] - row[less]), row
            # Of what noise hides there is no ratio.
            assert row[f"{name}_ratio"] == (pytest.approx(gloo / ours) if min(ours, gloo) > 0 else None), row
        assert row["bucket_view"] == bool(view) and not row["bound"], row


def test_the_table_of_ddp_fits_a_terminal():
    _, table = bench("ddp", "-n", "2", "--size", "1M", "--seconds", "0.05", "--alone")
    assert "empty  extra ratio  communication ratio" in table, table
    assert "tensorwire shared" in table and "gloo" not in table, table
    assert all(len(line) <= 80 for line in table.splitlines()), table


def test_what_is_missing_in_python_is_said(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not today')\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tensorwire", "bench", "barrier", "-n", "2", "--through", "torch"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "torch cannot be imported: not today" in ended.stderr, ended.stderr


@pytest.mark.skipif(not os.environ.get("TEST_FULL"), reason="takes minutes; scripts/test --full runs it")
def test_all_promised_figures_come_from_one_command(root, tmp_path):
    script = root / "benches" / "through_torch.py"
    launcher = tmp_path / "tensorwire"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tensorwire "$@"\n')
    launcher.chmod(0o755)
    words = ["--command", str(launcher), "--date", "2026-11-15", "--commit", "abc1234", "--quick"]
    ended = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=280)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0 and not [row for row in rows if "failed" in row], ended.stdout + ended.stderr
    head, figures = rows[0], [row for row in rows if "figure" in row]
    assert (head["date"], head["commit"]) == ("2026-11-15", "abc1234")
    assert head["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    wanted = ["1024 bytes", "shared memory", "communication of DDP", "DDP adds", "import", "init", "resident memory"]
    for words in wanted:
        assert any(words in row["figure"] for row in figures), words
    for row in figures:
        # A step of so small a model may hide in the noise.
        assert row["value"] is not None or "DDP" in row["figure"], row
        assert (row["met"] is None) == (row["value"] is None), row
    assert [row["limit"] for row in figures if "DDP" in row["figure"]] == [2] * 8, "with and without views"


def test_round_trips_of_a_tensor_are_measured():
    rows, _ = bench("lease", "--size", "64K", "--rounds", "3", "--device", "cpu", "--json")
    ways = ["tensorwire token", "tensorwire pipe", "tensorwire queue", "torch pipe", "torch queue"]
    assert [f"{row['library']} {row['medium']}" for row in rows] == ways
    for row in rows:
        assert row["op"] == "lease" and row["bytes"] == 65536 and row["rounds"] == 9 and row["median_us"] > 0, row
        assert (row["ratio"] is None) == (row["library"] == "torch"), row
