"""Write the table of packages in docs/architecture.md, from docstrings and import layers.

python scripts/package_table.py          writes the table
python scripts/package_table.py --check  fails if the table is out of date
"""

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/architecture.md"
PLACE = re.compile(r"(<!-- packages -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write the table, or check it with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail if the table is out of date; write nothing"
    )
    check = parser.parse_args().check
    old = DOCUMENT.read_text()
    new = PLACE.sub(lambda found: found[1] + "\n".join(rows()) + "\n" + found[3], old)
    if not check:
        DOCUMENT.write_text(new)
    elif new != old:
        sys.exit(f"{DOCUMENT.name}: out of date; run scripts/package_table.py")


def rows() -> Iterator[str]:
    """Yield the lines of the table: a row per package or module, from the top layer down."""
    yield "| layer | package or module of `epd` | what it is |"
    yield "| --- | --- | --- |"
    for number, layer in enumerate(layers(), 1):
        for name in layer:
            yield f"| {number} | `{name.removeprefix('epd.')}` | {described(name)} |"


def layers() -> list[list[str]]:
    """Return the layers that import-linter checks, the top one first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [checked] = [one["layers"] for one in contracts if one["name"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in checked]


def described(name: str) -> str:
    """Return the first line of the docstring of a package or module."""
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
