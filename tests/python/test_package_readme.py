"""What README.md says is true."""

import re
import subprocess
import sys

import pytest


def test_example_is_the_file(root):
    (block,) = blocks(root, "rust")
    assert block == (root / "examples/03_all_reduce.rs").read_text()
    assert block.count("\n") <= 20


@pytest.mark.parametrize("number", [0, 1])
def test_python_examples_run(root, number):
    text = blocks(root, "python")[number]
    for module in ("numpy", "torch"):
        if f"import {module}" in text:
            pytest.importorskip(module)
    command = [sys.executable, "-m", "tensorwire", "run", "-n", "2", "--", sys.executable, "-c", text]
    subprocess.run(command, check=True, timeout=120)


def test_every_python_example_is_run(root):
    assert len(blocks(root, "python")) == 2


def test_scripts_are_there(root):
    for command in re.findall(r"^scripts/\w+", "\n".join(blocks(root, "sh")), re.M):
        assert (root / command).stat().st_mode & 0o100, command


PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{name}.md" for name in ("design", "contributing", "python", "frameworks", "rust"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(root, page):
    for link in re.findall(r"\]\(([^)#:]+)\)", (root / page).read_text()):
        assert ((root / page).parent / link).exists(), link


def blocks(root, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (root / "README.md").read_text(), re.M | re.S)
