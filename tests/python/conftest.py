"""What all Python tests share. Files of tests are named by what they test."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pools():
    """Ranks that live as long as the session: pools(world).run(function)."""
    import ranks  # needs the package, which not every test does

    pools = ranks.Pools()
    yield pools
    pools.close()


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items):
    """Every test of a file that imports torch is one between torch and us."""
    for item in items:
        if any(is_torch(value) for value in vars(item.module).values()):
            item.add_marker("interop")


def is_torch(value) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"


def pytest_report_header():
    try:
        import torch
    except ImportError:
        return "torch: none"
    return f"torch: {torch.__version__}"
