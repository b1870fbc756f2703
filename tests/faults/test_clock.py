"""Row 66: a clock that jumps moves no deadline, as nothing is timed by it."""

import ast
from pathlib import Path

import pytest

import epd

WALL_CLOCK = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
"""Log lines have their time from structlog, or as structlog has it, and no other use of it."""

# `epd/tools` is no part of the proxy: benchmarks say when they were made, the doctor compares
# clocks, and `epd top` shows one.

TOLD = {
    *("dashboard.py: time.time", "recent.py: time.time", "instances.py: time.time"),
    "logs.py: time.time_ns",
}
"""When something happened, said to people: nothing waits for it."""

SHARED = {"conversations.py: time.time"}
"""How old is what another proxy has kept: at worst it is computed anew, and the store ends it by a
clock of its own."""


@pytest.mark.fault(66)
def test_nothing_asks_the_wall_clock() -> None:
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
    """What a node names, with its module: `from time import time` counts as `time.time`."""
    match node:
        case ast.Attribute():
            return [ast.unparse(node)]
        case ast.ImportFrom(module=str() as module):
            return [f"{module}.{alias.name}" for alias in node.names]
        case _:
            return []
