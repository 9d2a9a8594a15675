"""How torch finds the backend, and what that costs."""

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")


def run(script):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_finds_it_by_its_name():
    run("""
        import sys
        import torch.distributed as dist
        dist.init_process_group("tensorwire", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "tensorwire"
        import torch
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
    """)


def test_an_import_of_torch_imports_little_of_ours():
    out = run("""
        import sys
        import torch
        print([name for name in sys.modules if name.startswith("tensorwire.torch.")])
    """)
    assert out.split() == ["[]"]


def test_ours_does_not_import_torch():
    out = run("""
        import sys
        import tensorwire
        import tensorwire.torch
        print("torch" in sys.modules)
    """)
    assert out.split() == ["False"]


def test_it_can_be_registered_again_and_by_hand():
    run("""
        import tensorwire.torch
        tensorwire.torch.register()
        tensorwire.torch.register()
        import torch.distributed as dist
        assert dist.Backend("tensorwire") == "tensorwire"
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    """)


def test_errors_are_also_torchs():
    out = run("""
        import torch.distributed as dist
        import tensorwire
        dist.init_process_group("tensorwire", store=dist.HashStore(), rank=0, world_size=1)
        import torch
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG)
        except dist.DistBackendError as error:
            print(isinstance(error, tensorwire.MisuseError), isinstance(error, ValueError))
            import pickle
            print(type(pickle.loads(pickle.dumps(error))) is tensorwire.MisuseError)
        dist.destroy_process_group()
    """)
    assert out.split() == ["True", "True", "True"]
