"""The parser that all commands share."""

import argparse
from typing import NoReturn, TypeAlias

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message alone."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (--help lists the flags)\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - it has no public name
"""Where a command adds its own. Each sets `run`, which is called with the flags by name."""
