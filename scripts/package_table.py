"""Write the tables of packages in docs/architecture.md, from docstrings and import layers.

python scripts/package_table.py          writes the table
python scripts/package_table.py --check  fails if the table is out of date
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.generated import DOCS, ROOT, write_or_check

PACKAGES = {"packages": "epd", "store packages": "ec_store"}
"""Package of each table of the document."""


def table(name: str, _: str) -> str:
    """Return a table with a row per subpackage or module, from the top layer down."""
    return "".join(f"{line}\n" for line in rows(PACKAGES[name]))


def rows(package: str) -> Iterator[str]:
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
    write_or_check(__doc__, [DOCS / "architecture.md"], table)
