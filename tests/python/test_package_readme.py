"""What README.md says is true."""

import re
import subprocess
import sys

import pytest


def test_example_is_the_file(root):
    (block,) = blocks(root, "rust")
    assert block == (root / "examples/03_all_reduce.rs").read_text()
    assert block.count("\n") <= 20


def test_python_example_runs(root):
    (block,) = blocks(root, "python")
    subprocess.run([sys.executable, "-c", block], check=True, timeout=60)


def test_scripts_are_there(root):
    for command in re.findall(r"^scripts/\w+", "\n".join(blocks(root, "sh")), re.M):
        assert (root / command).stat().st_mode & 0o100, command


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/design.md", "docs/contributing.md"])
def test_links_lead_somewhere(root, page):
    for link in re.findall(r"\]\(([^)#:]+)\)", (root / page).read_text()):
        assert ((root / page).parent / link).exists(), link


def blocks(root, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (root / "README.md").read_text(), re.M | re.S)
