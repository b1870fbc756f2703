"""Published reports of `epd bench compare`, made from their JSON."""

import json
from pathlib import Path

import pytest

from scripts.generated import filled
from scripts.published_reports import REPORTS, read, section

FILES = sorted(REPORTS.glob("*.json"))


def test_each_report_is_in_a_page_and_up_to_date() -> None:
    pages = [page.read_text() for page in REPORTS.glob("*.md")]

    assert FILES
    assert all(any(f"<!-- report {file.name} -->" in page for page in pages) for file in FILES)
    assert [filled(page, section) for page in pages] == pages


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_figure_that_was_not_measured_is_shown_as_such(file: Path) -> None:
    text = file.read_text()
    shortened = json.loads(text)
    shortened["arms"]["epd"]["workloads"]["one at a time"]["ttft_ms"].pop("text")

    before, after = (read(one).markdown() for one in (text, json.dumps(shortened)))
    [row] = [line for line in after.splitlines() if line.startswith("| text |")]
    assert row.count("not measured") == 1
    assert row not in before
    assert "nan" not in after
