"""Parts of documents that scripts write, between comments, or check with `--check`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write_or_check(
    description: str,
    documents: Sequence[tuple[Path, Callable[[str], str]]],
    problems: Callable[[str], Sequence[str]] = lambda _text: (),
) -> None:
    """Fill the parts of each document; with `--check` on the command line, write nothing.

    Args:
        description: docstring of the script.
        documents: documents, each with a function from its text to its text with the parts.
        problems: returns what is wrong in a filled document.

    Raises:
        SystemExit: a document has problems, or is out of date with `--check`.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail if a document is out of date; write nothing"
    )
    check = parser.parse_args().check
    wrong = []
    for document, filled in documents:
        old = document.read_text()
        new = filled(old)
        found = [*problems(new)]
        if not check:
            document.write_text(new)
        elif new != old:
            found.append(f"out of date; run {Path(sys.argv[0]).name}")
        wrong += [f"{document.name}: {problem}" for problem in found]
    sys.exit("\n".join(wrong) or 0)
