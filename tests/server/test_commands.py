"""Commands of `epd` import only what they need."""

import subprocess
import sys

import pytest

IMPORTED = """
import sys
from epd.__main__ import make_parser
make_parser(sys.argv[1])
print(*(name for name in sys.modules if name.startswith("epd.tools.")))
"""


def tools_imported_by(command: str) -> set[str]:
    """Return the modules of `epd.tools` in a process that has made the command's parser."""
    arguments = [sys.executable, "-c", IMPORTED, command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_epd_serve_imports_no_tools() -> None:
    assert tools_imported_by("serve") == set()


@pytest.mark.parametrize(
    ("command", "module"),
    [("up", "epd.tools.fleet.command"), ("bench", "epd.tools.bench"), ("top", "epd.tools.top")],
)
def test_tools_are_imported_by_their_commands(command: str, module: str) -> None:
    assert module in tools_imported_by(command)
