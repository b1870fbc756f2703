from pathlib import Path

import pytest

from tests.support.fleet import Launch


@pytest.fixture
def launch() -> Launch:
    return Launch()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"
