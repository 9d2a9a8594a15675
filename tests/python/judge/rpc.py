"""PyTorch's tests of RPC that make a process group beside it: DDP under distributed autograd, and the order of both.

They name Gloo when they make the group. Here the call to init_process_group takes the backend under test instead.
"""

from pathlib import Path

import torch.distributed as dist
from ranks import Forked, check_group
from torch.testing._internal.common_distributed import MultiProcessTestCase

# Of the large test of RPC, those that make a group.
WITH_GROUP = {
    "RpcTest": ["test_pg_init_no_rpc_init", "test_deadlock", "test_init_pg_then_rpc", "test_init_rpc_then_pg"],
    "TensorPipeAgentRpcTest": ["test_dynamic_and_static_init_rpc_together"],
}


def classes() -> dict[str, type]:
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp
    from torch.testing._internal.distributed.rpc import rpc_test

    found = [ddp.DdpUnderDistAutogradTest, ddp.DdpComparisonTest, rpc_test.RpcTest, rpc_test.TensorPipeAgentRpcTest]
    return {cls.__name__: cls for cls in found}


def names() -> list[str]:
    """As Class.test."""
    return [
        f"{name}.{test}"
        for name, cls in classes().items()
        for test in WITH_GROUP.get(name, filter(lambda entry: entry.startswith("test"), dir(cls)))
    ]


def tests_for(backend: str, name: str, proof: Path) -> type:
    """A class of tests bound to a backend, in a process that is there for one test of it."""
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    init = dist.init_process_group

    class Tests(Forked, classes()[name], TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
        def run_test(self, test_name, pipe):
            def init_process_group(*args, **kwargs):
                if args or kwargs.pop("backend") != "gloo":
                    raise AssertionError("the test does not make its group as it used to")
                init(backend=backend, **kwargs)
                (proof / str(self.rank)).write_text(check_group(backend))

            dist.init_process_group = init_process_group
            super().run_test(test_name, pipe)

    return Tests
