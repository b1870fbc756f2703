"""Write the tables of packages in docs/architecture.md, from docstrings and import layers.

python scripts/package_table.py          writes the table
python scripts/package_table.py --check  fails if the table is out of date
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.generated import DOCS, write_or_check

ROOT = Path(__file__).resolve().parents[1]
TABLES = {"epd": "packages", "ec_store": "store packages"}
"""Package, and the mark of its table in the document."""


def main() -> None:
    """Write the tables, or check them with `--check`."""
    write_or_check(__doc__, [(DOCS / "architecture.md", filled)])


def filled(document: str) -> str:
    """Return the document with the table of each package."""
    for package, mark in TABLES.items():
        begin = f"<!-- {mark} -->\n"
        before, _, rest = document.partition(begin)
        _, end, after = rest.partition("<!-- end -->")
        document = before + begin + "\n".join(rows(package)) + "\n" + end + after
    return document


def rows(package: str) -> Iterator[str]:
    """Yield the lines of a table: a row per subpackage or module, from the top layer down."""
    yield f"| layer | package or module of `{package}` | what it is |"
    yield "| --- | --- | --- |"
    for number, layer in enumerate(layers(package), 1):
        for name in layer:
            yield f"| {number} | `{name}` | {described(ROOT / package / name)} |"


def layers(package: str) -> list[list[str]]:
    """Return the layers that import-linter checks, the top one first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [checked] = [
        contract["layers"] for contract in contracts if contract.get("containers") == [package]
    ]
    return [[name.strip() for name in layer.split("|")] for layer in checked]


def described(path: Path) -> str:
    """Return the first line of the docstring of a package or module."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
