"""What all classes of tests share: ranks that are forked, every rank's exit status, and what a group is made of."""

import ctypes
import os
import signal

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


class Forked:
    """Goes before PyTorch's MultiProcessTestCase."""

    exit_codes: list = []

    def setUp(self):
        super().setUp()
        self.before_start()
        # From a process that has imported everything and done nothing else: saves importing torch in each.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def before_start(self):
        """For what must be set after PyTorch's own preparation."""

    @classmethod
    def _run(cls, *args, **kwargs):
        die_with_parent()
        super()._run(*args, **kwargs)

    def _check_return_codes(self, *args):
        for process in self.processes:
            process.join(5)
        type(self).exit_codes = [process.exitcode for process in self.processes]
        super()._check_return_codes(*args)

    def tearDown(self):
        super().tearDown()
        for name in (self.file_name, self.file_name + "_pg"):
            if os.path.exists(name):
                os.remove(name)


def check_group(backend: str, device: str = "cpu") -> str:
    """The class that does the work of the default group; raises if that is not the backend under test."""
    name = dist.get_backend()
    if name != backend:
        raise AssertionError(f"the group's backend is {name}, not {backend}")
    group = dist.distributed_c10d._get_default_group()
    kind = type(group)
    if kind is dist.ProcessGroup:
        kind = type(group._get_backend(torch.device(device)))
    served_by = f"{kind.__module__}.{kind.__qualname__}"
    if (kind.__module__.partition(".")[0] == "tensorwire") != (backend == "tensorwire"):
        raise AssertionError(f"backend {backend} is served by {served_by}")
    return served_by


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
