"""Parts of documents that scripts write or check: between `<!-- name -->` and `<!-- end -->`."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Write = Callable[[str, str], str]
"""Function that returns the text of a part, from its name and its text so far."""


def write_or_check(
    description: str,
    documents: Sequence[Path],
    write: Write,
    problems: Callable[[str], Iterable[str]] = lambda _document: (),
) -> None:
    """Write the parts of each document; with `--check` on the command line, change no file.

    Args:
        description: docstring of the script.
        documents: documents with parts.
        write: writer of the parts.
        problems: returns what is wrong in a document with its new parts.

    Raises:
        SystemExit: a document has problems, or is out of date with `--check`.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail if a document is out of date; write nothing"
    )
    check = parser.parse_args().check
    found = [
        f"{document.name}: {problem}"
        for document in documents
        for problem in update(document, write, problems, check=check)
    ]
    sys.exit("\n".join(found) or 0)


def update(
    document: Path,
    write: Write,
    problems: Callable[[str], Iterable[str]] = lambda _document: (),
    *,
    check: bool,
) -> list[str]:
    """Write the parts of a document, or with `check` compare them; return what is wrong."""
    old = document.read_text()
    new = filled(old, write)
    if not check:
        document.write_text(new)
    outdated = [f"out of date; run {Path(sys.argv[0]).name}"] if check and new != old else []
    return [*problems(new), *outdated]


def filled(document: str, write: Write) -> str:
    """Return a document with new parts; all other text stays."""
    return PART.sub(lambda part: part[1] + write(part[2], part[3]) + part[4], document)
