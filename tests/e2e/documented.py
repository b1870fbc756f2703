"""Runs `epd` or `ec-store` for the test of the documents' commands.

`epd up` forks its engines, and all commands see only the fleets of the test.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

from ec_store.__main__ import main as ec_store
from ec_store.arena import sockets
from epd.__main__ import main as epd
from epd.tools.up import command
from scripts.forked import ForkedFleet

if __name__ == "__main__":
    program, *words = sys.argv[1:]
    own = Path(os.environ["XDG_RUNTIME_DIR"]) / sockets.FOLDER
    with (
        patch.object(command, "Fleet", ForkedFleet),
        patch.object(sockets, "SYSTEM", own),
        patch.object(sockets, "_temporary", lambda _: own),
    ):
        {"epd": epd, "ec-store": ec_store}[program](words)
