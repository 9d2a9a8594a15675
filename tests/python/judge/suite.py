"""PyTorch's own test of torch.distributed, from the installed wheel, made ready for a backend.

The tests are torch.testing._internal.distributed.distributed_test. Whether one of them runs is decided by decorators
when that module is imported, many of them by the name of the backend. We import it under the name "gloo", so that
every CPU test that Gloo may run is there, take away the skips listed below as well, and only then put the name of the
backend under test in place. Both backends see the same tests by construction. docs/torch-tests.md tells all of this.
"""

import os
import re
import unittest
from pathlib import Path

import gpus
import one_gpu
import pretend
import torch
import torch.distributed as dist
from ranks import Forked, check_group
from torch.testing._internal import common_distributed

# Skips that hang on a backend's name. They are lifted for both backends; those that ask for GPUs are run with
# CPU tensors, see pretend.py, or on one GPU, see one_gpu.py.
LIFTED = re.compile(
    r"Only MPI supports (CPU )?all_to_all"
    r"|Only N(CCL|ccl) (backend )?supports"
    r"|NCCL (Batch )?Send Recv Only"
    r"|Coalescing manager currently tests with NCCL only"
    r"|Test requires backend gloo to be one of"
)
# Of those, the ones that use CUDA tensors and do not ask whether there are any.
NEED_CUDA = {
    "test_all_to_all_cuda",
    "test_all_to_all_cuda_complex",
    "test_all_to_all_full_group_cuda",
    "test_all_to_all_group_cuda",
    "test_batch_isend_irecv_mixed_backend_err",
    "test_batch_isend_irecv_op_err",
}

# Tests whose body asks for BACKEND == "gloo" to choose a CPU model, long after the group was made.
CPU_MODEL_BY_NAME = {
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
}

# Seconds for a test.
OWN_LIMIT = 600

# A test whose images have 1000 x 1000 points, which is too much for a CPU. In torch 2.15 they have 64 x 64.
LARGE_IMAGES = "test_ddp_uneven_inputs"

# Tests that take long on a GPU.
LONG = {"test_ddp_compile_static_graph", LARGE_IMAGES, "test_ddp_apply_optim_in_backward"}

# Tests that a fault in torch itself lets fail with every backend. run.py sees to it that Gloo fails in the same way.
FAULTS_OF_TORCH = {
    "test_DistributedDataParallel": "DDP with a static graph, saved and loaded after its first step, keeps the mark that "
    "its first all-reduce was queued; that of its new reducer never is, and gradients stay local. Not run by torch 2.15 "
    "on Linux",
}

# Ranks of every test, and of those that ask for another number.
WORLD = 3
WORLD_OF = dict.fromkeys(
    (
        "test_3_level_hierarchical_model_averager",
        "test_gather_object",
        "test_gather_object_subgroup",
        "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size",
        "test_new_subgroups_overlap_not_allowed",
        "test_new_subgroups_with_group_param",
        "test_new_subgroups_world_size_not_divisible_by_group_size",
    ),
    4,
)


#: Whether the tests that ask for GPUs run on one, and no others.
on_gpu = False


def load(gpu: bool):
    """Imports the suite and lifts skips. Nothing is bound to a backend yet."""
    global on_gpu
    on_gpu = gpu
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(WORLD)
    os.environ["INIT_METHOD"] = "file://"  # decorators look at the kind only; each test has its own path
    # After that PyTorch ends a test itself and shows where its ranks are; run.py kills it a little later.
    common_distributed.TIMEOUT_DEFAULT = OWN_LIMIT
    common_distributed.TIMEOUT_OVERRIDE.clear()
    # This decorator lets MPI alone through below eight ranks. The tests need three.
    common_distributed.skip_if_small_worldsize = lambda test: test
    gpus.watch_decorators()
    from torch.testing._internal.distributed import distributed_test as suite

    for name, test in vars(suite.DistributedTest._DistTestBase).items():
        why = getattr(test, "__unittest_skip_why__", "")
        if LIFTED.match(why) or (name in WORLD_OF and "world size" in why):
            test.__unittest_skip__ = name in NEED_CUDA and not on_gpu
            test.__unittest_skip_why__ = "makes CUDA tensors"
    return suite


def names(suite) -> list[str]:
    """Of all tests; on a GPU of those that ask for some."""
    found = unittest.defaultTestLoader.getTestCaseNames(suite.DistributedTest._DistTestBase)
    return [name for name in found if not on_gpu or name in gpus.tests | NEED_CUDA]


def not_here(name: str) -> str | None:
    """Why a test cannot tell anything where it would run."""
    return (one_gpu if on_gpu else pretend).REALLY.get(name)


def tests_for(suite, backend: str, test: str, proof: Path) -> type:
    """The class of tests, bound to a backend; in a process that is there for this one test.

    Each rank writes down in the folder proof which class serves its group, and on a GPU what it had there.
    """
    os.environ["WORLD_SIZE"] = str(WORLD_OF.get(test, WORLD))
    put_name_in_place(suite, backend)
    if on_gpu:
        one_gpu.begin()
    elif test in gpus.tests:
        pretend.begin(suite)

    class Tests(Forked, suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def before_start(self):
            suite.INIT_METHOD = os.environ["INIT_METHOD"]  # spawned ranks would read it again

        def run_test(self, test_name, pipe):
            (proof / str(self.rank)).write_text(check_group(backend, "cuda" if on_gpu else "cpu"))
            if test_name in CPU_MODEL_BY_NAME:
                suite.BACKEND = "gloo"
            if test_name == LARGE_IMAGES:
                make_images_small()
            super().run_test(test_name, pipe)
            if on_gpu:
                (proof / f"{self.rank}.bytes").write_text(str(one_gpu.bytes_used()))

        def _barrier(self, *args, timeout=60, **kwargs):
            # The suite's barrier of files, not the backend's: its ten seconds are not enough on a busy machine.
            super()._barrier(*args, timeout=timeout, **kwargs)

    return Tests


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
    suite.CUDA_PROFILING_SUPPORTED_BACKENDS.append(backend)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    if torch_version() < (2, 14):
        dist.monitored_barrier = monitored_barrier


def make_images_small() -> None:
    """The size that newer versions of the test use, in this process."""
    ones = torch.ones

    def small(*shape, **kwargs):
        return ones(*shape[:2], 64, 64, **kwargs) if shape[2:] == (1000, 1000) else ones(*shape, **kwargs)

    torch.ones = small


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
