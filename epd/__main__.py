"""The `epd` command, with its subcommands."""

import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module

from epd.parser import Parser

COMMANDS: Mapping[str, str] = {
    "serve": "epd.server.serve",
    "check": "epd.check",
    "doctor": "epd.tools.doctor.command",
    "hash-key": "epd.hash_key",
    "up": "epd.tools.up.command",
    "bench": "epd.tools.bench",
    "top": "epd.tools.top",
    "observe": "epd.tools.observe.command",
}
"""Modules with the functions `add_parser` that add the commands, in the order of `--help`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. The exit code is 2 for invalid flags and 1 for a failure."""
    words = sys.argv[1:] if argv is None else argv
    flags = vars(make_parser(*words[:1]).parse_args(words))
    del flags["command"]
    run = flags.pop("run")
    with _closed_output_exits():
        run(**flags)


@contextmanager
def _closed_output_exits() -> Iterator[None]:
    """Exit with 1 and without a traceback if standard output is closed: `epd check | head`."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(1)


def make_parser(command: str = "") -> Parser:
    """Return the parser of a command; of all commands for a name that is none.

    The other commands are not imported: `epd up` and `epd top` start three times as fast without
    the proxy.
    """
    parser = Parser(prog="epd", description="Multimodal EPD proxy for vLLM.")
    parser.add_version()
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (COMMANDS[command],) if command in COMMANDS else COMMANDS.values():
        import_module(module).add_parser(commands)
    return parser


if __name__ == "__main__":
    main()
