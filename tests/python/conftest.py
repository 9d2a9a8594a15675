"""What all Python tests share. Files of tests are named by what they test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items):
    """Tests that talk to torch are skipped where there is none; scripts/test says so in its summary."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        skip = pytest.mark.skip(reason=f"no torch here: {error}")
        for item in items:
            if "interop" in item.keywords:
                item.add_marker(skip)


def pytest_report_header():
    try:
        import torch
    except ImportError:
        return "torch: none"
    return f"torch: {torch.__version__}"
