"""Tests of the connector in this process; `tests/e2e` has those that need whole engines."""

import importlib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ec_store.vllm_connector.steps import Connect


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exclude all tests of this folder, which import vLLM, from the quick tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("full")


@pytest.fixture(scope="session")
def vllm(models: Path) -> Any:
    """Return the `Pieces` of vLLM for a tiny model."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    with warnings.catch_warnings(action="ignore"):
        pieces = importlib.import_module("tests.ec_store.vllm_connector.pieces")
        return pieces.Pieces(models / "tiny-qwen2.5-vl")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def connect(vllm: Any, url: str) -> Iterator[Connect]:
    """Return a function that makes scheduler-side connectors; close them at the end."""
    opened = []

    def connect(**options: Any) -> Any:
        opened.append(vllm.connector({"store": url, **options}))
        return opened[-1]

    yield connect
    for connector in opened:
        connector.shutdown()
