"""Sockets of servers of hosts' memories, in a folder that only the test uses."""

from pathlib import Path

import pytest

from ec_store.arena import sockets


def use_own_sockets(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Let this process look for sockets in a folder alone; return its user's runtime folder."""
    patch.setattr(sockets, "SYSTEM", folder / sockets.FOLDER)
    patch.setattr(sockets, "_temporary", lambda user: folder / f"{sockets.FOLDER}-{user}")
    patch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / sockets.FOLDER
