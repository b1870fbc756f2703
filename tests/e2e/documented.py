"""Runs `epd` or `ec-store` for the test of the documents' commands.

`epd up` forks its engines, and all commands see only the fleets of the test.
"""

import os
import sys
from pathlib import Path

import pytest

from ec_store.__main__ import main as ec_store
from epd.__main__ import main as epd
from epd.tools.up import command
from scripts.forked import ForkedFleet
from tests.support.own_sockets import use_own_sockets

if __name__ == "__main__":
    program, *words = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Fleet", ForkedFleet)
        use_own_sockets(Path(os.environ["XDG_RUNTIME_DIR"]), patch)
        {"epd": epd, "ec-store": ec_store}[program](words)
