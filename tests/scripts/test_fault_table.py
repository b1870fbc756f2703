from functools import partial
from pathlib import Path

import pytest

from scripts import fault_table
from scripts.generated import update

DOCUMENT = """# Faults

<!-- tests of fault -->
| # | fault | tests |
| --- | --- | --- |
| 1 | fire | |
| 2 | water | |
<!-- end -->

By hand.

<!-- tests of fault -->
| # | fault | tests |
| --- | --- | --- |
| 3 | keys | |
<!-- end -->
"""
TESTS = """
import pytest
KINDS = [1, 2]
pytestmark = [pytest.mark.fault(3)]

@pytest.mark.fault(1)
def test_a(): ...

@pytest.mark.parametrize("kind", [1, pytest.param(2, marks=pytest.mark.fault(1))])
async def test_b(kind): ...

@pytest.mark.fault(1)
def helper(): ...

@pytest.mark.fault(2)
class TestAll:
    def test_c(self): ...
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "http").mkdir(parents=True)
    (tmp_path / "tests" / "http" / "test_x.py").write_text(TESTS)
    path = tmp_path / "faults.md"
    path.write_text(DOCUMENT)
    return path


def problems(document: Path, *, write: bool = False) -> list[str]:
    tests = fault_table.shown([document.parent / "tests"])
    table, found = partial(fault_table.table, tests), partial(fault_table.problems, tests)
    return update(document, table, found, check=not write)


def test_each_row_gets_its_tests(document: Path) -> None:
    [outdated] = problems(document)
    assert outdated.startswith("out of date; run ")
    assert problems(document, write=True) == []
    assert problems(document) == []

    lines = document.read_text().splitlines()
    assert lines[5] == "| 1 | fire | http/test_x.py (2) |"
    assert lines[6] == "| 2 | water | http/test_x.py (1) |"
    assert lines[9] == "By hand."
    assert lines[14] == "| 3 | keys | http/test_x.py (3) |"


def test_a_row_that_loses_its_test_is_noticed(document: Path) -> None:
    problems(document, write=True)
    path = document.parent / "tests" / "http" / "test_x.py"
    path.write_text(TESTS.replace("@pytest.mark.fault(2)", ""))

    assert problems(document)[:-1] == ["no test shows 2"]
    assert problems(document, write=True) == ["no test shows 2"]
    assert document.read_text().splitlines()[6] == "| 2 | water | none yet |"


def test_a_missing_test_of_a_row_is_detected(document: Path) -> None:
    path = document.parent / "tests" / "http" / "test_y.py"
    path.write_text("import pytest\n@pytest.mark.fault(99)\ndef test_d(): ...\n")

    assert problems(document, write=True) == ["tests name row 99, which is missing"]
