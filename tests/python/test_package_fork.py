"""Forked processes: harmless as long as they leave the group of their parent alone, and an error when they do not."""

import os
import subprocess
import sys
import traceback

import pytest

import tensorwire

np = pytest.importorskip("numpy")


@pytest.fixture
def group(tmp_path):
    yield tensorwire.init(f"file://{tmp_path}/meet", rank=0, world=1, timeout=30)
    tensorwire.finalize()


def in_a_child(body):
    """Runs it in a forked process, which must end well."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


USES = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "in flight": lambda group: group.all_reduce(np.ones(3), async_op=True),
    "barrier": lambda group: group.barrier(),
    "send": lambda group: group.send(np.ones(3), 0, async_op=True),
    "recv": lambda group: group.recv(np.ones(3), 0, async_op=True),
    "subgroup": lambda group: group.subgroup([0]),
    "split": lambda group: group.split(0),
    "shrink": lambda group: group.shrink(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_in_a_child_is_an_error(group, use):
    def body():
        with pytest.raises(tensorwire.MisuseError, match="fork"):
            use(group)

    in_a_child(body)
    group.barrier()


def test_default_group_of_a_child_is_its_own(group, tmp_path):
    def body():
        with pytest.raises(tensorwire.MisuseError, match=r"forked.*tensorwire\.init\(\)"):
            tensorwire.group()
        own = tensorwire.init(f"file://{tmp_path}/child", rank=0, world=1, timeout=30)
        numbers = tensorwire.empty(1000)
        numbers[:] = 3
        own.all_reduce(numbers)
        assert tensorwire.group() is own and (numbers == 3).all()
        tensorwire.finalize()

    in_a_child(body)
    group.barrier()
    assert tensorwire.group() is group


def test_two_children_talk(group, tmp_path):
    """As workers that are forked after the parent has used its own group."""

    def rank(number):
        def body():
            own = tensorwire.init(f"file://{tmp_path}/children", rank=number, world=2, timeout=60)
            numbers = np.full(10_000, number + 1.0)
            own.all_reduce(numbers)
            assert (numbers == 3).all()
            own.barrier()

        return body

    first = os.fork()
    if first == 0:
        try:
            rank(1)()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    in_a_child(rank(0))
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0


def test_close_in_a_child_harms_nobody(group):
    shared = tensorwire.empty(1000)
    shared[:] = 5

    def body():
        group.close()
        tensorwire.finalize()

    in_a_child(body)
    group.all_reduce(shared)
    assert (shared == 5).all()


def test_end_of_a_child_harms_nobody(tmp_path):
    """A child that ends as Python ends, with all that is done and dropped at exit."""
    code = f"""
import os, sys, tensorwire
group = tensorwire.init("file://{tmp_path}/meet", rank=0, world=1, timeout=30)
memory = tensorwire.alloc(1 << 20)
if os.fork() == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
group.all_reduce(memory)
assert os.path.exists("{tmp_path}/meet")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_memory_of_the_parent_in_a_child(group):
    """It is the same memory, as with every shared mapping."""
    shared = tensorwire.empty(4)

    def body():
        shared[:] = 7

    in_a_child(body)
    assert (shared == 7).all()
