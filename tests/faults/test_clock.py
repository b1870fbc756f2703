"""Row 66: a jump of the wall clock moves no deadline, since no deadline uses it."""

import ast
from pathlib import Path

import pytest

import epd

WALL_CLOCK = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
"""Functions that read the wall clock. Only log lines, through structlog, and the places below may
use it."""

# `epd/tools` is not part of the proxy: benchmarks record their date, the doctor compares clocks,
# and `epd top` shows the time.

TOLD = {
    *("dashboard.py: time.time", "recent.py: time.time", "registry.py: time.time"),
    "logs.py: time.time_ns",
}
"""Uses that only show when something happened."""

SHARED = {"conversations.py: time.time"}
"""Uses for the age of an entry from another proxy: a wrong age only causes a recomputation, and the
store expires the entry by its own clock."""


@pytest.mark.fault(66)
def test_deadlines_do_not_use_the_wall_clock() -> None:
    here = Path(epd.__file__).parent
    modules = [it for it in here.rglob("*.py") if "tools" not in it.relative_to(here).parts]
    found = [
        f"{module.name}: {name}"
        for module in modules
        for node in ast.walk(ast.parse(module.read_text()))
        for name in names(node)
        if any(name == clock or name.endswith(f".{clock}") for clock in WALL_CLOCK)
    ]

    assert len(modules) > 30
    assert set(found) == TOLD | SHARED


def names(node: ast.AST) -> list[str]:
    """Return the qualified names in a node: `from time import time` counts as `time.time`."""
    match node:
        case ast.Attribute():
            return [ast.unparse(node)]
        case ast.ImportFrom(module=str() as module):
            return [f"{module}.{alias.name}" for alias in node.names]
        case _:
            return []
