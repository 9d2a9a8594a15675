"""Every block of docs/python.md runs."""

import re

import pytest
from pages import DOCS, add_commands, blocks, run

np = pytest.importorskip("numpy")

PAGE = DOCS / "python.md"
BLOCKS = blocks("python.md")
# A program that is started by a block of its own has its name in the first line.
FILES = {
    found[1]: text for language, text in BLOCKS if language == "python" and (found := re.match(r"# (\w+\.py)\n", text))
}


def title(block):
    return block[1].splitlines()[0]


@pytest.fixture
def folder(tmp_path):
    """The programs of the page, and the commands that its reader has on PATH."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    add_commands(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0] == "sh"], ids=title)
def test_command(folder, block):
    if "torch" in block[1]:
        pytest.importorskip("torch")
    run(folder, block[1], shell=True)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block[0] == "python" and block[1] not in FILES.values()]
)
def test_program(folder, block, world):
    if "import torch" in block[1]:
        pytest.importorskip("torch")
    if "import scipy" in block[1]:
        pytest.importorskip("scipy")
    (folder / "program.py").write_text(block[1])
    run(folder, ["tensorwire", "run", "-n", str(world), "--", "python", "program.py"])


def test_every_named_program_is_started():
    commands = "".join(text for language, text in BLOCKS if language == "sh")
    for name, text in FILES.items():
        assert name in commands
    assert {language for language, _ in BLOCKS} == {"python", "sh", "text"}


def test_first_program_is_short():
    assert FILES["first.py"].count("\n") <= 20


def test_page_names_every_error():
    import tensorwire.errors

    for name in tensorwire.errors.__all__:
        assert f"`{name}`" in PAGE.read_text(), name
