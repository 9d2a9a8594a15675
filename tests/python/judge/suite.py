"""PyTorch's own test of torch.distributed, from the installed wheel, made ready for a backend.

The tests are torch.testing._internal.distributed.distributed_test. Whether one of them runs is decided by decorators
when that module is imported, many of them by the name of the backend. We import it under the name "gloo", so that
every CPU test that Gloo may run is there, take away the skips listed below as well, and only then put the name of the
backend under test in place. Both backends see the same tests by construction. docs/torch-tests.md tells all of this.
"""

import ctypes
import os
import signal
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

# Skips that hang on a backend's name and are lifted for both backends: the tests need neither that backend nor a GPU.
LIFTED_REASONS = {
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
}
# The same, where the reason is shared with tests that do need a GPU or two backends.
LIFTED_TESTS = {"test_batch_isend_irecv_op_list_err"}

# Tests whose body asks for BACKEND == "gloo" to choose a CPU model, long after the group was made.
CPU_MODEL_BY_NAME = {
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
}

# Ranks of every test, and of those that ask for another number.
WORLD = 3
WORLD_OF = {
    "test_gather_object": 4,
    "test_gather_object_subgroup": 4,
    "test_new_subgroups_with_group_param": 4,
}

PR_SET_PDEATHSIG = 1


def load():
    """Imports the suite and lifts skips. Nothing is bound to a backend yet."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(WORLD)
    os.environ["INIT_METHOD"] = "file://"  # decorators look at the kind only; each test has its own path
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "100")
    # This decorator lets MPI alone through below eight ranks. The tests need three.
    common_distributed.skip_if_small_worldsize = lambda test: test
    from torch.testing._internal.distributed import distributed_test as suite

    for name, test in vars(suite.DistributedTest._DistTestBase).items():
        why = getattr(test, "__unittest_skip_why__", "")
        if name in LIFTED_TESTS or why in LIFTED_REASONS or (name in WORLD_OF and "world size" in why):
            test.__unittest_skip__ = False
    return suite


def names(suite) -> list[str]:
    """Of all tests."""
    return unittest.defaultTestLoader.getTestCaseNames(suite.DistributedTest._DistTestBase)


def tests_for(suite, backend: str, test: str, proof: Path) -> type:
    """The class of tests, bound to a backend; in a process that is there for this one test.

    Each rank writes down in the folder proof which class serves its group.
    """
    os.environ["WORLD_SIZE"] = str(WORLD_OF.get(test, WORLD))
    put_name_in_place(suite, backend)

    class TorchTests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        exit_codes: list = []

        def setUp(self):
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]  # spawned ranks would read it again
            # Forked from a process that has imported everything and done nothing else: saves importing torch.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args, **kwargs):
            die_with_parent()
            super()._run(*args, **kwargs)

        def run_test(self, test_name, pipe):
            (proof / str(self.rank)).write_text(check_group(backend))
            if test_name in CPU_MODEL_BY_NAME:
                suite.BACKEND = "gloo"
            super().run_test(test_name, pipe)

        def _barrier(self, *args, timeout=60, **kwargs):
            # The suite's barrier of files, not the backend's: its ten seconds are not enough on a busy machine.
            super()._barrier(*args, timeout=timeout, **kwargs)

        def _check_return_codes(self, *args):
            for process in self.processes:
                process.join(5)
            type(self).exit_codes = [process.exitcode for process in self.processes]
            super()._check_return_codes(*args)

    return TorchTests


def put_name_in_place(suite, backend: str) -> None:
    """From here on the suite makes its groups with the backend under test."""
    os.environ["BACKEND"] = backend
    suite.BACKEND = backend
    if backend == "gloo":
        return
    for feature in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in feature:
            feature.add(backend)
    # The profiler must show our operations just as Gloo's.
    suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    if torch_version() < (2, 14):
        dist.monitored_barrier = monitored_barrier


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
    """torch.distributed.monitored_barrier without its look at the backend's name, as it is in newer versions."""
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        return None
    timeout = timeout or dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    return group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def check_group(backend: str) -> str:
    """The class that does the work of the default group; raises if that is not the backend under test."""
    name = dist.get_backend()
    if name != backend:
        raise AssertionError(f"the group's backend is {name}, not {backend}")
    group = dist.distributed_c10d._get_default_group()
    kind = type(group)
    if kind is dist.ProcessGroup:
        kind = type(group._get_backend(torch.device("cpu")))
    served_by = f"{kind.__module__}.{kind.__qualname__}"
    if (kind.__module__.partition(".")[0] == "tensorwire") != (backend == "tensorwire"):
        raise AssertionError(f"backend {backend} is served by {served_by}")
    return served_by


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
