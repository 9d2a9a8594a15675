"""The package as a whole: it imports alone, its stubs are true, its errors are caught as one expects."""

import ast
import builtins
import pickle
import re
import subprocess
import sys
import tomllib

import pytest

import tensorwire
from tensorwire import _native, errors


def test_import_needs_nothing_else():
    code = "import sys, tensorwire; assert not {'torch', 'numpy'} & set(sys.modules), 'imports too much'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_is_the_workspaces(root):
    manifest = tomllib.loads((root / "Cargo.toml").read_text())
    assert tensorwire.__version__ == manifest["workspace"]["package"]["version"]


def test_every_public_name_is_there():
    assert sorted(tensorwire.__all__) == list(tensorwire.__all__)
    for name in tensorwire.__all__:
        assert hasattr(tensorwire, name), name
    exported = set(tensorwire.__all__)
    assert public(vars(_native)) <= exported
    assert set(errors.__all__) <= exported


def test_stubs_have_what_the_module_has(root):
    stub = ast.parse((root / "python/tensorwire/_native.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == public(vars(_native))
    for name, node in classes.items():
        declared = public(member.name for member in node.body if isinstance(member, ast.FunctionDef))
        assert declared == public(vars(getattr(_native, name))), name


def test_stubs_have_the_parameters_of_the_module(root):
    stub = ast.parse((root / "python/tensorwire/_native.pyi").read_text())
    for node in (node for node in stub.body if isinstance(node, ast.ClassDef)):
        cls = getattr(_native, node.name)
        for member in (member for member in node.body if isinstance(member, ast.FunctionDef)):
            if member.name.startswith("_") and member.name != "__init__":
                continue
            subject = cls if member.name == "__init__" else getattr(cls, member.name)
            signature = getattr(subject, "__text_signature__", None)
            if signature is None:
                assert member.decorator_list, f"{node.name}.{member.name} has no signature"
                continue
            written = re.findall(r"\w+", re.sub(r"=[^,)]*|\$", "", signature))
            declared = [arg.arg for arg in member.args.args]
            assert [name for name in written if name != "self"] == [name for name in declared if name != "self"]


def test_every_name_says_what_it_is():
    for name in public(vars(_native)):
        cls = getattr(_native, name)
        assert cls.__doc__, name
        assert cls.__module__ == "tensorwire", name
        for member in public(vars(cls)):
            assert getattr(cls, member).__doc__, f"{name}.{member}"


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_one_family(name):
    assert issubclass(getattr(tensorwire, name), tensorwire.TensorwireError)
    assert issubclass(getattr(tensorwire, name), RuntimeError)


def test_errors_are_also_what_python_calls_them():
    assert issubclass(tensorwire.TimeoutError, builtins.TimeoutError)
    assert issubclass(tensorwire.MisuseError, ValueError)


def test_errors_survive_a_pickle():
    error = tensorwire.PeerError("rank 3 died", kind="died", rank=3)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.rank) == ("rank 3 died", "died", 3)
    assert str(pickle.loads(pickle.dumps(tensorwire.TimeoutError("late")))) == "late"


def public(names):
    return {name for name in names if not name.startswith("_")}
