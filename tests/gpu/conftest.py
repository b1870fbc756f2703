"""Tests that need a CUDA device, but not vLLM, a network or the project's other packages."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _missing() -> str | None:
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch  # noqa: PLC0415 - torch may be missing

    return None if torch.cuda.is_available() else "PyTorch finds no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(pytest.mark.skip(missing))
