"""What the documents tell people to type is taken by the commands; every decision is listed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ec_store.cli
from epd.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$|^((?:    .*\n)+)", re.MULTILINE | re.DOTALL)
SYNOPSIS = re.compile(r"[|…─]| \.\.\.|=command | [A-Z]\b")
"""What stands for something else, and is not to be typed as it is."""


def commands(page: Path) -> Iterator[str]:
    """The lines of a page that begin with `epd` or `ec-store`, variables in front left out."""
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


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_in_the_documents_is_taken(line: str) -> None:
    program, *words = shlex.split(re.split(">+", line)[0], comments=True)
    parser = make_parser() if program == "epd" else ec_store.cli.make_parser()

    parser.parse_args(words)


def test_every_decision_is_in_their_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text()

    assert [page.name for page in sorted(folder.glob("0*.md")) if page.name not in index] == []
