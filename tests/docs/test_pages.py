"""Commands in the documents parse, and references in the documents resolve."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import ec_store.__main__
from ec_store.disk.config import StoreSettings
from epd.__main__ import make_parser
from tests.deploy.tools import PROMETHEUS, rules

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$|^((?:    .*\n)+)", re.MULTILINE | re.DOTALL)
SYNOPSIS = re.compile(r"[|…─]| \.\.\.|=command | [A-Z]\b")
"""Placeholders in a command; such a command is not meant to be typed literally."""


LINK = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
REFERENCE = re.compile(r"\b(docs/[\w/.-]+\.md)#([\w-]+)")


FILE = re.compile(r"`((?:docs|epd|scripts|tests)/[\w/.-]+)`")
"""File or folder of the repository, as documents name it."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs builds them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    texts = [re.sub(r"[^\w\s-]", "", text.lower()) for text in headings]
    return {re.sub(r"[-\s]+", "-", text.strip()) for text in texts}


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of a page that start with `epd` or `ec-store`, without leading variables."""
    for block in CODE.finditer(page.read_text()):
        code = "".join(group or "" for group in block.groups())
        for line in re.sub(r"\\\n\s*", "", code).splitlines():
            words = re.sub(r"^(\w+=\S+ )+", "", line.strip())
            if words.startswith(("epd ", "ec-store ")):
                yield words


COMMANDS = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:40]}")
    for page in PAGES
    for line in commands(page)
    if not SYNOPSIS.search(line.partition(" #")[0]) and line.count("'") % 2 == 0
]


def test_the_documents_contain_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_in_the_documents_is_taken(line: str) -> None:
    program, *words = shlex.split(re.split(">+", line)[0], comments=True)
    parser = make_parser() if program == "epd" else ec_store.__main__.make_parser()

    parser.parse_args(words)


def test_every_decision_is_in_their_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text()

    assert [page.name for page in sorted(folder.glob("0*.md")) if page.name not in index] == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "SECURITY.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_to_headings_resolve(page: Path) -> None:
    lost = [
        f"{target}#{anchor}"
        for target, anchor in LINK.findall(page.read_text())
        if anchor not in anchors(page.parent / target if target else page)
    ]

    assert lost == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name
)
def test_files_that_documents_name_exist(page: Path) -> None:
    named = FILE.findall(page.read_text())

    assert [file for file in named if not (ROOT / file).exists()] == []


def test_every_alert_is_in_the_guide_and_its_runbook_leads_to_headings() -> None:
    guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    references = REFERENCE.findall((PROMETHEUS / "alerts.yaml").read_text())

    assert {"EpdEngineStoreUnused", "EpdStoreMaintenanceLate"} <= set(alerts)
    assert [name for name in alerts if f"`{name}`" not in guide] == []
    assert references
    assert [one for one in references if one[1] not in anchors(ROOT / one[0])] == []


def test_every_setting_of_a_store_is_documented() -> None:
    text = (ROOT / "docs" / "configuration" / "store.md").read_text()

    assert [one.name for one in fields(StoreSettings) if f"`{one.name}" not in text] == []


def test_every_curl_line_with_a_body_names_its_type() -> None:
    """Without the header curl sends a form, which the proxy refuses (415)."""
    joined = [page.read_text().replace("\\\n", " ") for page in PAGES]
    commands = [line for text in joined for line in text.splitlines() if "curl " in line]
    bodies = [line for line in commands if re.search(r" -d | --data", line)]

    assert len(bodies) >= 3
    assert [line for line in bodies if "Content-Type: application/json" not in line] == []
