"""The tests that SECURITY.md names exist and have the matching marker."""

import re

import pytest

from tests.paths import ROOT

ROW = re.compile(r"\| (S\d+) \| (.+?) \| (.+?) \|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
ROWS = ROW.findall((ROOT / "SECURITY.md").read_text())


@pytest.mark.security("S25")
def test_every_requirement_has_a_row() -> None:
    assert [number for number, *_ in ROWS] == [f"S{number}" for number in range(1, 28)]


@pytest.mark.security("S25")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_links_to_tests_that_are_marked_with_it(row: tuple[str, str, str, str]) -> None:
    number, _, state, shown = row
    tests = LINK.findall(shown)

    assert tests or not state.startswith("yes")
    for path in tests:
        marks = re.findall(r"mark\.security\(([^)]*)\)", (ROOT / path).read_text())
        assert any(f'"{number}"' in mark for mark in marks), path


@pytest.mark.parametrize(
    "page", ["SECURITY.md", "docs/threat-model.md", "docs/decisions/013-access.md"]
)
def test_links_resolve(page: str) -> None:
    path = ROOT / page
    for link in LINK.findall(path.read_text()):
        assert (path.parent / link).exists(), link
