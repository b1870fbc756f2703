"""The `epd` command, with its subcommands."""

import asyncio
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import uvloop

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.flags import add_flags
from epd.config.load import Loaded, as_json, as_yaml, load
from epd.config.proxy_config import LiveConfig
from epd.conversations import conversations
from epd.edge.listening import CannotListen
from epd.edge.request_head import raise_limit
from epd.http.tls import TlsInvalid
from epd.observe import logs
from epd.parser import Commands, Parser
from epd.server.reload import unusable_files
from epd.server.serve import serve, serve_as_worker
from epd.server.workers import WorkersFailed, supervise
from epd.tenants import KeysInvalid, key_line, new_key


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

    The other commands are not imported: `epd serve` starts a quarter faster without them.
    """
    parser = Parser(prog="epd", description="Multimodal EPD proxy for vLLM.")
    parser.add_version()
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (COMMANDS[command],) if command in COMMANDS else COMMANDS.values():
        add(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="run the proxy",
        description="Run an OpenAI-compatible proxy that sends media to encode instances, then "
        "the request to prefill and decode instances. Every flag can also be set as EPD_<FLAG> in "
        "the environment or by name in the file of --config. OPENAI_API_KEY is sent to the "
        "instances if a client sends no key; ADMIN_API_KEY opens /metrics and profiling.",
        epilog="example: epd serve --encode-servers-urls http://e1:8001,http://e2:8001 "
        "--decode-servers-urls http://pd:8002",
        usage="epd serve --encode-servers-urls URLS --decode-servers-urls URLS [FLAG ...]",
    )
    _add_settings_command(parser, _serve)


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="check the settings of `epd serve` with the same flags",
        description="Check flags, environment, the file of --config and the files that they name, "
        "and print all settings with their sources, as a file for --config. Secrets are hidden. "
        "Nothing is started.",
        epilog="example: epd check --config epd.yaml",
        usage="epd check [--format yaml|json] [FLAG of epd serve ...]",
    )
    parser.add_argument(
        "--format",
        choices=("yaml", "json"),
        default="yaml",
        help="format of the output (default: yaml)",
    )
    _add_settings_command(parser, _check)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine the fleet that `epd serve` would use with the same flags",
        description="Examine every instance, the store and this machine as the proxy would use "
        "them, and report what to change. Each stage gets a small request for one token, to verify "
        "its work; a new picture is written to the store. The exit code is 1 if requests would "
        "fail or be slow.",
        epilog="example: epd doctor --config epd.yaml",
        usage="epd doctor [--no-requests] [--format text|json] [FLAG of epd serve ...]",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="format of the output (default: text)",
    )
    parser.add_argument(
        "--no-requests",
        action="store_true",
        help="read only what instances report; send no generation requests",
    )
    _add_settings_command(parser, _doctor)


def _add_hash_key(commands: Commands) -> None:
    parser = commands.add_parser(
        "hash-key",
        help="make an API key, or hash one",
        description="Print a line for --api-keys-file. The file holds only hashes: a new key is "
        "shown once, on stderr.",
        epilog="example: epd hash-key alice >> keys",
    )
    parser.add_argument("tenant", metavar="TENANT", help="tenant of the key")
    parser.add_argument(
        "--stdin", action="store_true", help="hash the key in the first line of stdin"
    )
    parser.set_defaults(run=partial(_hash_key, parser))


def _add_tool(module: str, commands: Commands) -> None:
    import_module(module).add_parser(commands)


COMMANDS: Mapping[str, Callable[[Commands], None]] = {
    "serve": _add_serve,
    "check": _add_check,
    "doctor": _add_doctor,
    "hash-key": _add_hash_key,
    "up": partial(_add_tool, "epd.tools.fleet.command"),
    "bench": partial(_add_tool, "epd.tools.bench"),
    "top": partial(_add_tool, "epd.tools.top"),
}
"""Functions that add the commands to the parser, in the order of `--help`."""


def _add_settings_command(parser: Parser, run: Callable[..., None]) -> None:
    """Add the flags of all settings to a command, and set its function."""
    add_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def _hash_key(parser: Parser, tenant: str, *, stdin: bool) -> None:
    try:
        key = sys.stdin.readline().strip() if stdin else new_key()
        line = key_line(tenant, key)
    except ValueError as error:
        parser.error(str(error))
    if not stdin:
        print(key, file=sys.stderr)
    print(line)


def _serve(parser: Parser, **flags: Any) -> None:
    config = _loaded(parser, flags).config
    logs.configure(config.log_format, config.log_level)
    raise_limit()
    conversations.warn_of(config)

    def read() -> ProxyConfig:
        return load(flags).config

    live = LiveConfig(config)
    try:
        if config.workers == 1:
            uvloop.run(serve(live, read))
        else:
            # Not uvloop: a fork cannot leave its loop, and starts another one.
            asyncio.run(supervise(live, read, serve_as_worker))
    except (KeysInvalid, TlsInvalid) as error:  # a file changed after its check
        parser.errors([str(error)])
    except (CannotListen, WorkersFailed, OSError) as failure:
        sys.exit(f"epd serve: {failure}")


def _check(parser: Parser, *, format: str = "yaml", **flags: Any) -> None:  # noqa: A002 - a flag's name
    loaded = _loaded(parser, flags)
    print(as_json(loaded) if format == "json" else as_yaml(loaded))


def _doctor(
    parser: Parser,
    *,
    format: str,  # noqa: A002 - a flag's name
    no_requests: bool,
    **flags: Any,
) -> None:
    from epd.tools.doctor import examination  # noqa: PLC0415 - no other command needs it

    loaded = _loaded(parser, flags)
    examination.run(loaded.config, requests=not no_requests, as_document=format == "json")


def _loaded(parser: Parser, flags: dict[str, Any]) -> Loaded:
    """Return the configuration, or exit with the errors of settings and of the files they name."""
    try:
        loaded = load(flags)
    except ConfigInvalid as invalid:
        parser.errors(invalid.reasons)
    if reasons := list(unusable_files(loaded.config)):
        parser.errors(reasons)
    for message in loaded.unknown:
        print(f"{parser.prog}: warning: {message}", file=sys.stderr)
    return loaded


if __name__ == "__main__":
    main()
