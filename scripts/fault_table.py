"""Write the tests of each row into the tables of docs/faults.md and SECURITY.md.

    python scripts/fault_table.py          writes the last column of each table
    python scripts/fault_table.py --check  fails if a table is out of date or a row has no test

The tests are those in tests/ and the contracts in ec_store/testing. A test belongs to a row if it
has the marker `@pytest.mark.fault(7)` or `@pytest.mark.security("S3")`, or if its class, its module
or one of its parameter sets has it. A table is between two comments, `<!-- tests of <marker> -->`
and `<!-- end -->`. The first cell of a row is its number. The last cell has the files of its tests,
with the number of tests in each.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "tests", ROOT / "ec_store")
DOCUMENTS = ("docs/faults.md", "SECURITY.md")
TABLE = re.compile(r"(<!-- tests of (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HEADER_LINES = 2
NOTHING = "none yet"

Shown = Mapping[str, Counter[str]]
"""Number of tests of each row, by file."""


def main() -> None:
    """Write the tables, or check them with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail if a table is out of date; write nothing"
    )
    check = parser.parse_args().check
    problems = [
        problem
        for document in DOCUMENTS
        if (ROOT / document).exists()
        for problem in update(ROOT / document, FOLDERS, write=not check)
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(check and bool(problems))


def update(document: Path, tests: Sequence[Path], *, write: bool) -> Iterator[str]:
    """Update a document's tables, and yield the errors in them."""
    old = document.read_text()
    new = TABLE.sub(
        lambda found: found[1] + table(found[3], shown(tests, found[2])) + found[4], old
    )
    if write:
        document.write_text(new)
    elif new != old:
        yield f"{document.name}: out of date; run scripts/fault_table.py"
    rows: dict[str, dict[str, str]] = {}
    for found in TABLE.finditer(new):
        lines = found[3].splitlines()[HEADER_LINES:]
        rows.setdefault(found[2], {}).update(map(row_and_tests, lines))
    for marker, cells in rows.items():
        yield from (
            f"{document.name}: no test shows {row}" for row in cells if cells[row] == NOTHING
        )
        unknown = sorted(set(shown(tests, marker)) - set(cells))
        yield from (f"{document.name}: tests name row {row}, which is missing" for row in unknown)


def table(old: str, tests: Shown) -> str:
    lines = old.splitlines()
    for number, line in enumerate(lines[HEADER_LINES:], HEADER_LINES):
        row, _ = row_and_tests(line)
        files = tests.get(row, Counter())
        cell = ", ".join(f"{file} ({count})" for file, count in sorted(files.items())) or NOTHING
        lines[number] = f"{line.rpartition('|')[0].rpartition('|')[0]}| {cell} |"
    return "".join(f"{line}\n" for line in lines)


def row_and_tests(line: str) -> tuple[str, str]:
    """Return the first and the last cell of a line of a table."""
    cells = line.strip().strip("|").split("|")
    return cells[0].strip(), cells[-1].strip()


def shown(tests: Sequence[Path], marker: str) -> Shown:
    """Return the rows that the tests in folders are marked with."""
    rows: dict[str, Counter[str]] = {}
    for folder in tests:
        for path in folder.rglob("*.py"):
            for row in rows_in(ast.parse(path.read_text()), marker):
                rows.setdefault(row, Counter())[str(path.relative_to(folder))] += 1
    return rows


def rows_in(module: ast.Module, marker: str) -> Iterator[str]:
    """Yield the rows of each test of a module, once per test."""
    for_all = {row for name, value in assignments(module) if name == "pytestmark"
               for row in marks(value, marker)}  # fmt: skip
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            of_class = for_all.union(*(marks(each, marker) for each in node.decorator_list))
            yield from (row for each in node.body for row in rows_of(each, marker, of_class))
        else:
            yield from rows_of(node, marker, for_all)


def rows_of(node: ast.stmt, marker: str, beside: set[str]) -> set[str]:
    """Return the rows of a test; an empty set if the statement is not a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    if not node.name.startswith("test_"):
        return set()
    return beside.union(*(marks(each, marker) for each in node.decorator_list))


def assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the assignments to simple names at the top level of a module."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def marks(expression: ast.expr, marker: str) -> set[str]:
    return {
        str(argument.value)
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{marker}"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


if __name__ == "__main__":
    main()
