"""Runs the programs of a page of the docs, as its reader would."""

import os
import pathlib
import re
import subprocess
import sys

#: Seconds after which a program counts as hanging.
LIMIT = 280
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def blocks(name):
    """The blocks of a page, each with its language."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / name).read_text(), re.M | re.S)


def add_commands(folder):
    """The commands that a reader has on PATH."""
    commands = {"python": "", "tensorwire": "-m tensorwire", "torchrun": "-m torch.distributed.run"}
    (folder / "bin").mkdir()
    for name, module in commands.items():
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        command.chmod(0o755)


def run(folder, command, *, limit=LIMIT, **options):
    """Runs a command there; fails with all that it wrote."""
    path = f"{folder}/bin:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PATH": path, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"},
        capture_output=True,
        text=True,
        timeout=limit,
        **options,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stderr + ended.stdout
