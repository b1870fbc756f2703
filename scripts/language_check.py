"""Check the English of docstrings, comments, strings, documents and names.

CONTRIBUTING.md has the rules. A place that needs one of the words, such as the rule itself, is
listed in `ALLOWED`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("epd", "ec_store", "scripts", "tests")
DOCUMENTS = ("*.md", "docs/**/*.md", "examples/**/*.yaml", "deploy/**/*.yaml")

PERSONS = re.compile(
    r"\b(who|whom|whose|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE
)
"""Words for persons. Components are things; persons are named: the operator, the client."""

QUAINT = re.compile(
    r"\b(anew|as yet|all the same|for ever|are none of|is none of|left alone|let go of|gone around"
    r"|sent away|given back|has it that|is over|is met|be had|besides)\b",
    re.IGNORECASE,
)
"""Phrases with a plain or technical synonym: again, is not, skipped, released, rejected, ends."""

NO_SUBJECT = re.compile(
    r"test_(what|where|who|whose|whoever|which|how|that|those|there|it|its|they|their|of|in|as|so"
    r"|one_that|this|these|no_one|nothing|another|without|both|some|others)_"
)
"""Beginnings of a test's name without its subject, which is the component."""

PRONOUNS = frozenset({"one", "said", "told", "it", "its", "there", "this", "that", "they", "them"})
"""Variable names that do not describe the value; tests are exempt."""

MIN_WORDS = 4
"""Words of a docstring below which it repeats the signature; tests are exempt."""

ALLOWED = {
    *(("CONTRIBUTING.md", word) for word in ("who", "whose", "nobody")),
    ("scripts/make_media.py", "whoever"),  # drawn in a committed picture
}
"""Places that may use a word: path and word."""


def main() -> None:
    """Print each hit, and exit with 1 if there is one."""
    problems = [
        f"{path}:{line}: {what}"
        for path, line, word, what in sorted(hits())
        if (path, word) not in ALLOWED
    ]
    sys.exit("\n".join(problems) or 0)


def hits() -> Iterator[tuple[str, int, str, str]]:
    """Yield path, line, word and message of each hit."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path == Path(__file__).resolve():
                continue
            source = path.read_text()
            texts = [*comments(source), *strings(source)]
            yield from _hits_of(path, texts)
            if package == "tests":
                yield from _names_without_subject(path, source)
            else:
                yield from _short_docstrings(path, source)
                yield from _pronouns(path, source)
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            yield from _hits_of(path, list(enumerate(path.read_text().splitlines(), 1)))


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string with a space, docstrings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.splitlines()):
                yield node.lineno + number, line


def _hits_of(path: Path, texts: list[tuple[int, str]]) -> Iterator[tuple[str, int, str, str]]:
    name = str(path.relative_to(ROOT))
    for line, text in texts:
        for found in (*PERSONS.finditer(text), *QUAINT.finditer(text)):
            word = found[0].lower()
            yield name, line, word, f"{word!r} in {text.strip()[:100]!r}"


def _names_without_subject(path: Path, source: str) -> Iterator[tuple[str, int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = str(path.relative_to(ROOT))
            if NO_SUBJECT.match(node.name):
                yield name, node.lineno, "name", f"begin {node.name} with its subject"


def _pronouns(path: Path, source: str) -> Iterator[tuple[str, int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound) | ast.MatchAs(name=bound):
                if bound in PRONOUNS:
                    name = str(path.relative_to(ROOT))
                    yield name, node.lineno, bound, f"name {bound!r} by what it holds"


def _short_docstrings(path: Path, source: str) -> Iterator[tuple[str, int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text.split()) < MIN_WORDS:
                line = getattr(node, "lineno", 1)
                name = str(path.relative_to(ROOT))
                yield name, line, "docstring", f"a docstring of {len(text.split())} words: {text!r}"


if __name__ == "__main__":
    main()
