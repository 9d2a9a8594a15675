"""What docs/frameworks.md says is true: its programs run, and what it says about names is so."""

import importlib
import os
import re
import shutil

import pytest
from pages import DOCS, add_commands, blocks, run
from said import Said

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import on_ranks, world  # noqa: E402, F401

import tensorwire.torch  # noqa: E402
from tensorwire.torch.backend import PYTHON_BACKENDS  # noqa: E402

FRAMEWORKS = ("lightning", "accelerate", "ignite", "torchmetrics")
PAGE = (DOCS / "frameworks.md").read_text()
PROGRAMS = [text for language, text in blocks("frameworks.md") if language == "python"]


def need(module):
    """Skips the test where a framework is not installed. scripts/venv installs all of them, so CI has them."""
    if os.environ.get("CI") == "true":
        importlib.import_module(module)
    pytest.importorskip(module, reason=f"{module} is not installed; scripts/venv installs it")


@pytest.fixture
def folder(tmp_path):
    add_commands(tmp_path)
    return tmp_path


def title(program):
    """The last heading above it."""
    return re.findall(r"^## (.*)$", PAGE[: PAGE.index(program)], re.M)[-1]


@pytest.mark.timeout(900)  # torch.compile starts a C++ compiler
@pytest.mark.parametrize("program", PROGRAMS, ids=title)
def test_program(folder, program):
    for module in FRAMEWORKS:
        if f"import {module}" in program:
            need(module)
    if "torch.compile" in program and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler: there is no g++")
    (folder / "program.py").write_text(program)
    (command,) = [text for language, text in blocks("frameworks.md") if language == "sh"]
    run(folder, command, limit=850, shell=True)


def test_the_versions_are_those_that_are_installed(root):
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)"', (root / "scripts/venv").read_text()))
    for name in FRAMEWORKS:
        package = {"ignite": "pytorch-ignite"}.get(name, name)
        row = next(line for line in PAGE.splitlines() if line.lower().startswith(f"| {name} |"))
        assert row.endswith(f"| {pinned[package]} |"), row


def test_accelerate_refuses_the_name(folder):
    need("accelerate")
    (folder / "program.py").write_text("""
import accelerate
try:
    accelerate.PartialState(cpu=True, backend="tensorwire")
except ValueError as error:
    print(error)
""")
    said = run(folder, ["tensorwire", "run", "-n", "1", "--", "python", "program.py"])
    assert re.search(r'refuses the name: "(.*?)"', PAGE)[1] in said, said


def test_ignite_refuses_the_name_and_does_not_wrap_models(folder):
    need("ignite")
    (folder / "program.py").write_text("""
import ignite.distributed as idist
import torch
try:
    idist.initialize("tensorwire")
except ValueError as error:
    print(error)
torch.distributed.init_process_group("tensorwire")
assert type(idist.auto_model(torch.nn.Linear(1, 1))) is torch.nn.Linear
""")
    said = run(folder, ["tensorwire", "run", "-n", "2", "--", "python", "program.py"])
    assert re.search(r'is refused: "(.*?)\.\.\."', PAGE)[1] in said, said


class AsGloo(Said):
    """What is logged; behind it, "gloo" is Gloo again."""

    def __exit__(self, *error):
        super().__exit__(*error)
        tensorwire.torch.as_gloo(False)


def is_ours(group):
    return type(group).__module__.startswith("tensorwire.")


@on_ranks
def test_gloo_means_us_between_two_calls(rank, size):
    before = dist.BackendConfig.__init__
    assert not is_ours(dist.new_group(backend="gloo"))
    with AsGloo() as said:
        tensorwire.torch.as_gloo()
        tensorwire.torch.as_gloo()
        (line,) = said.lines
        assert '"gloo"' in line and "tensorwire" in line, line
        for name in ("gloo", "GLOO", "cpu:gloo"):
            group = dist.new_group(backend=name)
            assert is_ours(group) and dist.get_backend_config(group) == "cpu:tensorwire"
            numbers = torch.full((3,), rank + 1.0)
            dist.all_reduce(numbers, group=group)
            assert numbers.tolist() == [3.0] * 3
            if name == "gloo":
                # What torch allows for this name alone.
                dist.monitored_barrier(group)
                assert dist.get_backend(group) == "gloo"
        tensorwire.torch.as_gloo(False)
        tensorwire.torch.as_gloo(False)
        assert len(said.lines) == 1 and dist.BackendConfig.__init__ is before
        assert not is_ours(dist.new_group(backend="gloo"))
        # A group stays what it is.
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [6.0] * 3


@on_ranks
def test_gloo_beside_another_backend(rank, size):
    with AsGloo() as said:
        tensorwire.torch.as_gloo()
        config = dist.BackendConfig("cpu:gloo,cuda:nccl").get_device_backend_map()
        assert config["cuda"] == "nccl" and config["cpu"] == ("tensorwire" if PYTHON_BACKENDS else "gloo")
        assert len(said.lines) == (1 if PYTHON_BACKENDS else 2) and (PYTHON_BACKENDS or "keeps Gloo" in said.lines[1])
        # Only where Gloo is for the CPU.
        assert dist.BackendConfig("cpu:mpi,cuda:gloo").get_device_backend_map() == {"cpu": "mpi", "cuda": "gloo"}
        assert dist.BackendConfig(backend="nccl").get_device_backend_map() == {"cuda": "nccl"}


@on_ranks
def test_collectives_in_a_compiled_function(rank, size):
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    @torch.compile(backend="aot_eager", fullgraph=True)
    def one_graph(x):
        return all_reduce(x * 2, "sum", dist.group.WORLD) + all_gather_tensor(x, 0, dist.group.WORLD).sum()

    @torch.compile(backend="aot_eager")
    def several(x):
        dist.all_reduce(x)
        return x + 1

    assert one_graph(torch.full((3,), rank + 1.0)).tolist() == [6 + 9] * 3
    assert several(torch.full((3,), rank + 1.0)).tolist() == [4] * 3
