"""Commands of `epd` import only what they need."""

import subprocess
import sys

import pytest

import epd
from epd.__main__ import COMMANDS, make_parser
from epd.server import app

IMPORTED = """
import sys
from epd.__main__ import make_parser
make_parser(sys.argv[1])
print(*(name for name in sys.modules if name.startswith("epd.")))
"""


def imported_by(command: str) -> set[str]:
    """Return the modules of `epd` in a process that has made the command's parser."""
    arguments = [sys.executable, "-c", IMPORTED, command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("command", ["serve", "check"])
def test_commands_of_the_proxy_import_no_tools(command: str) -> None:
    modules = imported_by(command)

    assert "epd.check" in modules
    assert not {name for name in modules if name.startswith("epd.tools")}


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("up", "epd.tools.up.command"),
        ("bench", "epd.tools.bench"),
        ("top", "epd.tools.top"),
        ("hash-key", "epd.hash_key"),
    ],
)
def test_other_commands_do_not_import_the_proxy(command: str, module: str) -> None:
    modules = imported_by(command)

    assert module in modules
    assert not {name for name in modules if name.startswith("epd.server")}


def test_help_of_all_commands_names_each() -> None:
    shown = make_parser().format_help()

    assert [name for name in COMMANDS if f"\n    {name} " in shown] == list(COMMANDS)


def test_the_package_has_its_public_names_and_rejects_another() -> None:
    for name in epd.__all__:
        assert getattr(epd, name)
    assert epd.create_app is app.create_app
    with pytest.raises(AttributeError, match="module 'epd' has no attribute 'create'"):
        epd.create  # type: ignore[attr-defined]  # noqa: B018
