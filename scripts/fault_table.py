"""Write the tests of each fault into the tables of docs/faults.md.

    python scripts/fault_table.py          writes the last column of each table
    python scripts/fault_table.py --check  fails if a table is out of date or a row has no test

The tests are those in tests/ and the contracts in ec_store/testing. A test belongs to a row if it
has the marker `@pytest.mark.fault(7)`, or if its class, its module or one of its parameter sets has
it. The first cell of a row is its number. The last cell has the files of its tests, with the number
of tests in each.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts.generated import DOCS, PART, ROOT, write_or_check

FOLDERS = (ROOT / "tests", ROOT / "ec_store")
MARKER = "pytest.mark.fault"
HEADER_LINES = 2
NOTHING = "none yet"

Shown = Mapping[str, Counter[str]]
"""Number of tests of each row, by file."""


def problems(tests: Shown, document: str) -> Iterator[str]:
    """Yield the rows of a document without a test, and the rows that only tests name."""
    tables = (part[3].splitlines()[HEADER_LINES:] for part in PART.finditer(document))
    rows = dict(row_and_tests(line) for lines in tables for line in lines)
    yield from (f"no test shows {row}" for row in rows if rows[row] == NOTHING)
    unknown = sorted(tests.keys() - rows.keys())
    yield from (f"tests name row {row}, which is missing" for row in unknown)


def table(tests: Shown, _: str, old: str) -> str:
    """Return a table with the tests of its rows in the last column."""
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


def shown(folders: Sequence[Path]) -> Shown:
    """Return the rows that the tests in folders are marked with."""
    rows: dict[str, Counter[str]] = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            for row in rows_in(ast.parse(path.read_text())):
                rows.setdefault(row, Counter())[str(path.relative_to(folder))] += 1
    return rows


def rows_in(module: ast.Module) -> Iterator[str]:
    """Yield the rows of each test of a module, once per test."""
    for_all = {row for name, value in assignments(module) if name == "pytestmark"
               for row in marks(value)}  # fmt: skip
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            of_class = for_all.union(*map(marks, node.decorator_list))
            yield from (row for each in node.body for row in rows_of(each, of_class))
        else:
            yield from rows_of(node, for_all)


def rows_of(node: ast.stmt, beside: set[str]) -> set[str]:
    """Return the rows of a test; an empty set if the statement is not a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    if not node.name.startswith("test_"):
        return set()
    return beside.union(*map(marks, node.decorator_list))


def assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the assignments to simple names at the top level of a module."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def marks(expression: ast.expr) -> set[str]:
    return {
        str(argument.value)
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == MARKER
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


if __name__ == "__main__":
    found = shown(FOLDERS)
    write_or_check(__doc__, [DOCS / "faults.md"], partial(table, found), partial(problems, found))
