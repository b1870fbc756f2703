"""Runs `epd`, and forks the engines of `epd up`."""

from unittest.mock import patch

from epd.__main__ import main
from epd.tools.up import command
from scripts.forked import ForkedFleet

if __name__ == "__main__":
    with patch.object(command, "Fleet", ForkedFleet):
        main()
