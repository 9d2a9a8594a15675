"""The package as a whole: it imports alone, its stubs are true, its errors are caught as one expects."""

import ast
import builtins
import os
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
    # The command is for the shell; open would hide Python's own; outstanding and last_words are for the end of the process;
    # calls, files, events, operations in flight and strictness are for tensorwire.torch; what is of pipes and calls has its classes in
    # tensorwire.pipe and tensorwire.rpc; the rest is for tensorwire.symmetric.
    inner = {"Calls", "is_strict", "last_words", "main", "open", "open_event", "open_file", "operation_on", "outstanding"}
    inner |= {"Call", "Incoming", "Receiving", "Rpc", "Symmetric", "is_shared", "pooled", "rendezvous"}
    assert public(vars(_native)) - inner <= exported
    assert callable(tensorwire.open)
    assert set(errors.__all__) <= exported


def test_strictness_is_that_of_the_environment():
    for value, expected in (("0", "False"), ("1", "True")):
        command = [sys.executable, "-c", "from tensorwire import _native; print(_native.is_strict())"]
        environment = {**os.environ, "TENSORWIRE_STRICT": value}
        assert subprocess.check_output(command, env=environment, text=True, timeout=60).strip() == expected


def test_stubs_have_what_the_module_has(root):
    stubs = declared_in(root)
    assert set(stubs) == public(vars(_native))
    for name, node in stubs.items():
        subject = getattr(_native, name)
        assert isinstance(subject, type) == isinstance(node, ast.ClassDef), name
        if isinstance(node, ast.ClassDef):
            declared = public(member.name for member in node.body if isinstance(member, ast.FunctionDef))
            assert declared == public(vars(subject)), name


def test_stubs_have_the_parameters_of_the_module(root):
    for name, node in declared_in(root).items():
        subject = getattr(_native, name)
        if isinstance(node, ast.FunctionDef):
            assert parameters(subject) == declared_parameters(node), name
            continue
        for member in (member for member in node.body if isinstance(member, ast.FunctionDef)):
            if member.name.startswith("_") and member.name != "__new__":
                continue
            of = subject if member.name == "__new__" else getattr(subject, member.name)
            if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in member.decorator_list):
                assert getattr(of, "__text_signature__", None) is None, f"{name}.{member.name} is no property"
            else:
                assert parameters(of) == declared_parameters(member), f"{name}.{member.name}"


def test_every_name_says_what_it_is():
    for name in public(vars(_native)):
        subject = getattr(_native, name)
        assert subject.__doc__, name
        if isinstance(subject, type):
            assert subject.__module__ == "tensorwire", name
            for member in public(vars(subject)):
                assert getattr(subject, member).__doc__, f"{name}.{member}"
    for name in tensorwire.__all__:
        assert name == "__version__" or getattr(tensorwire, name).__doc__, name


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_one_family(name):
    assert issubclass(getattr(tensorwire, name), tensorwire.TensorwireError)
    assert issubclass(getattr(tensorwire, name), RuntimeError)


def test_errors_are_also_what_python_calls_them():
    assert issubclass(tensorwire.TimeoutError, builtins.TimeoutError)
    assert issubclass(tensorwire.MisuseError, ValueError)


def test_errors_about_peers_are_peer_errors():
    assert issubclass(tensorwire.PeerDiedError, tensorwire.PeerError)
    assert issubclass(tensorwire.MismatchError, tensorwire.PeerError)


def test_native_code_finds_every_class():
    assert set(errors.raised) == set(errors.__all__)
    for name, cls in errors.raised.items():
        assert issubclass(cls, getattr(errors, name))


def test_classes_can_be_exchanged(monkeypatch):
    class Other(tensorwire.TimeoutError):
        pass

    monkeypatch.setitem(errors.raised, "TimeoutError", Other)
    with pytest.raises(Other):
        tensorwire.MemoryStore().wait(["missing"], 0)


@pytest.mark.parametrize("cls", [tensorwire.PeerError, tensorwire.PeerDiedError, tensorwire.MismatchError])
def test_errors_survive_a_pickle(cls):
    error = cls("rank 3 left", kind="left", rank=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.kind, again.rank) == (cls, "rank 3 left", "left", 3)
    assert str(pickle.loads(pickle.dumps(tensorwire.TimeoutError("late")))) == "late"


def declared_in(root):
    """The public classes and functions of the stubs."""
    stub = ast.parse((root / "python/tensorwire/_native.pyi").read_text())
    nodes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {name: node for name, node in nodes.items() if not name.startswith("_")}


def declared_parameters(node):
    """The names before and after the star; what takes any others is among those before."""
    arguments = node.args
    others = [star + arg.arg for star, arg in (("*", arguments.vararg), ("**", arguments.kwarg)) if arg is not None]
    before = [arg.arg for arg in arguments.args if arg.arg not in ("self", "cls")]
    return before + others, [arg.arg for arg in arguments.kwonlyargs]


def parameters(subject):
    """The same of native code, which writes its signature as text."""
    signature = getattr(subject, "__text_signature__", None)
    if signature is None and isinstance(subject, type):
        return [], []
    assert signature, f"{subject} has no signature"
    names = re.sub(r"=('[^']*'|[^,)]*)|[$()/]", "", signature).replace(" ", "").split(",")
    names = [name for name in names if name not in ("", "self")]
    star = names.index("*") if "*" in names else len(names)
    return names[:star], names[star + 1 :]


def public(names):
    return {name for name in names if not name.startswith("_")}
