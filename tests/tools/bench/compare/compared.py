"""Runs `epd` with another module in the place of `epd up`: `compared.py MODULE bench compare`."""

import sys
from unittest.mock import patch

from epd.__main__ import main
from epd.tools.bench.compare import arms

if __name__ == "__main__":
    with patch.object(arms, "EPD", (sys.executable, "-m", sys.argv.pop(1))):
        main()
