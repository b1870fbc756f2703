"""Fork server of `epd`."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.forking import ForkedProgram, next_program, start_server


def fork_epd(*arguments: str, environment: Mapping[str, str]) -> ForkedProgram:
    """Fork `epd` with these arguments; its standard error is a pipe."""
    return ForkedProgram(_server(), arguments, environment)


@functools.cache
def _server() -> Path:
    return start_server(__name__)


def main() -> None:
    """Serve requests; in a forked program, run `epd`."""
    from epd import __main__ as epd  # noqa: PLC0415 - only this process needs its imports

    epd.make_parser("serve")  # which imports the proxy
    request = next_program(Path(sys.argv[1]))
    if request is not None:
        sys.argv = ["epd", *request["arguments"]]
        epd.main()


if __name__ == "__main__":
    main()
