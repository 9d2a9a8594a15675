"""Measures what a user of torch gets from tensorwire, as JSON lines; the last lines compare it with what is promised.

    python benches/through_torch.py --command target/release/tensorwire --date 2026-11-15 --commit 0a47fa3 > torch.jsonl

The Python that runs it must find torch and tensorwire. It takes about five minutes; --quick only shows that it works.
Lines are a head, the rows of `tensorwire bench` (each run has a line of its own before them), footprints, and figures:
what was promised, what was seen, and whether that is enough. The exit code is 0 whatever the figures are.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOOTPRINT = Path(__file__).resolve().with_name("footprint.py")
# A run that takes longer hangs.
LIMIT = 400
IMPORT = "import time; t = time.perf_counter(); import tensorwire; print(time.perf_counter() - t)"


def say(**row):
    print(json.dumps(row), flush=True)


def run(words, limit=LIMIT):
    """The JSON lines that a command prints; None, with a line that says why, if it failed."""
    environment = {**os.environ, "PYTHON": sys.executable}
    try:
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit)
    except (subprocess.TimeoutExpired, OSError) as error:
        say(failed=shown(words), error=str(error))
        return []
    if ended.returncode != 0:
        say(failed=shown(words), error=ended.stderr.strip()[-2000:])
    elif ended.stderr.strip():
        print(ended.stderr.strip(), file=sys.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def shown(words):
    return " ".join(["tensorwire", *map(str, words[1:])])


def bench(command, *words):
    """The rows of a bench, which are also printed."""
    words = [command, "bench", *words, "--json"]
    say(command=shown(words))
    rows = run(words)
    for row in rows:
        say(**row)
    return rows


def median_us(rows, peer, size):
    found = [row["median_us"] for row in rows if row.get("peer") == peer and row.get("bytes") == size]
    return found[0] if found else None


def figure(what, value, unit, limit, at_most):
    """What was promised and what was seen."""
    met = None if value is None else value <= limit if at_most else value >= limit
    say(figure=what, value=value, unit=unit, limit=limit, limit_is="at most" if at_most else "at least", met=met)


def ratio(above, below):
    return above / below if above is not None and below else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", required=True, help="the command tensorwire")
    parser.add_argument("--date", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--without-ddp", action="store_true", help="all but the steps of DDP, most of the time")
    parser.add_argument("--quick", action="store_true", help="few ranks and small sizes: whether it works at all")
    args = parser.parse_args()
    small, large = 1 << 10, (1 << 20 if args.quick else 128 << 20)
    ranks, steppers = ("2", "2") if args.quick else ("8", "4")
    seconds = ["--seconds", "0.02" if args.quick else "0.3"]
    head(args)

    sizes = ["-n", ranks, "--sizes", f"{small},{large}" if args.quick else "1K,64K,1M,16M,128M"]
    through = ["all-reduce", *sizes, "--through", "torch"]
    both = [*through, "--against", "gloo"]
    # Gloo's threads need more than one core; ours do best with one each; and torchrun binds nobody.
    private = bench(args.command, *both, "--bind", "ours", *seconds)
    shared = bench(args.command, *through, "--memory", "shared", "--bind", "ours", *seconds)
    free = bench(args.command, *both, "--bind", "none", *seconds)
    free_shared = bench(args.command, *through, "--memory", "shared", "--bind", "none", *seconds)
    every = ["-n", ranks, "--sizes", "1K,1M", "--through", "torch", "--against", "gloo", "--bind", "none"]
    bench(args.command, *every, *seconds)

    # Communication is a small difference of large times: fewer steps only show noise.
    steps = ["ddp", "-n", steppers, *(["--size", "1M", "--seconds", "0.1"] if args.quick else ["--seconds", "15"])]
    plain = [] if args.without_ddp else bench(args.command, *steps)
    views = [] if args.without_ddp else bench(args.command, *steps, "--bucket-view")

    imports = [float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(3 if args.quick else 15)]
    import_ms = statistics.median(imports) * 1e3
    say(op="import", median_ms=import_ms, max_ms=max(imports) * 1e3, times=len(imports))
    footprints = run([args.command, "run", "-n", ranks, "--no-prefix", "--", sys.executable, str(FOOTPRINT)])
    for row in footprints:
        say(**row)

    name = f"all_reduce through torch, {ranks} ranks"
    for bind, ours, ours_shared in (("ours", private, shared), ("none", free, free_shared)):
        bound = "tensorwire bound to cores, Gloo not" if bind == "ours" else "nobody bound to cores"
        gloo = median_us(ours, "gloo", large)
        figure(f"{name}, {small} bytes, {bound}", median_us(ours, "tensorwire", small), "us", 25, True)
        for memory, rows, wanted in (("private", ours, 2.5), ("shared", ours_shared, 5)):
            value = ratio(gloo, median_us(rows, "tensorwire", large))
            figure(f"{name}, {large} bytes, {memory} memory, {bound}", value, "times as fast as Gloo", wanted, False)
    for rows, view in ((plain, ""), (views, ", gradients are views of buckets")):
        for row in rows:
            if row["peer"] == "tensorwire":
                setting = f"{steppers} ranks, {row['bytes']} bytes, {row['memory']} memory{view}"
                unit = "times as fast as Gloo"
                figure(f"communication of DDP, {setting}", row["communication_ratio"], unit, 2, False)
                # What users feel, and what the promise was held against first; DDP's own copies are in it.
                figure(f"all that DDP adds to a step, {setting}", row["extra_ratio"], unit, 2, False)
    figure("import of tensorwire", import_ms, "ms", 50, True)
    for row in footprints:
        if row["op"] == "init":
            figure(f"init of a group of {ranks} ranks through {row['through']}", row["median_ms"], "ms", 200, True)
        else:
            figure(f"resident memory of an idle group of {ranks} ranks, {row['which']}", row["mib"], "MiB", 10, True)


def head(args):
    """Where, when, what and how."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    cores = len(os.sched_getaffinity(0))
    say(
        machine=f"{model}, {cores} cores",
        cores=cores,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=version("torch"),
        tensorwire=version("tensorwire"),
        date=args.date,
        commit=args.commit,
        command="python benches/through_torch.py"
        + (" --without-ddp" if args.without_ddp else "")
        + (" --quick" if args.quick else ""),
    )


if __name__ == "__main__":
    main()
