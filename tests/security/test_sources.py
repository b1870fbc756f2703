"""Things that the source of both packages must not contain."""

import re
from pathlib import Path

import pytest

import ec_store
import epd

PACKAGES = [Path(package.__file__ or "").parent for package in (epd, ec_store)]
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
UNSAFE = re.compile(r"\b(pickle|cPickle|cloudpickle|dill|shelve|marshal|torch\.load|yaml\.load)\b")


def test_the_sources_of_vllm_are_found() -> None:
    assert len(SOURCES) > 50
    assert UNSAFE.search("import pickle")


@pytest.mark.security("S15")
@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_sources_unpickle_no_data(path: Path) -> None:
    """S15 of SECURITY.md."""
    assert UNSAFE.search(path.read_text()) is None
