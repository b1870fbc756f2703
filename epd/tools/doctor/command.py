"""Command `epd doctor`: its flags and its output."""

import asyncio
import sys
from typing import Any

from epd.check import BY_URL, add_settings_command, add_url, load_or_ask
from epd.config.shown import REDACTED
from epd.parser import Commands, Parser
from epd.tools.doctor.examination import examine
from epd.tools.doctor.findings import FAIL, as_json, as_text, worst_verdict


def add_parser(commands: Commands) -> None:
    """Add `doctor` to the commands of `epd`."""
    parser = commands.add_parser(
        "doctor",
        help="examine the fleet that `epd serve` would use with the same flags",
        description="Examine every instance, the store and this machine as the proxy would use "
        "them, and report what to change. Each stage gets a small request for one token, to verify "
        "its work; a new picture is written to the store. To measure KV transfers, each pair of "
        "prefill and decode instances gets a prompt of up to 1 GB of KV blocks. The exit code "
        "is 1 if requests would fail or be slow. " + BY_URL,
        epilog="example: epd doctor --config epd.yaml",
        usage="epd doctor [--url URL] [--no-requests] [--format text|json] [FLAG of epd serve ...]",
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
    add_url(parser)
    add_settings_command(parser, _run)


def _run(
    parser: Parser,
    *,
    url: str | None,
    format: str,  # noqa: A002 - a flag's name
    no_requests: bool,
    **flags: Any,
) -> None:
    """Print the findings. Exit with code 1 if one of them is `fail`."""
    loaded, instances = load_or_ask(parser, url, flags)
    config = loaded.config
    if REDACTED in (config.ec_store or ""):
        parser.error("the proxy does not show the password of its store: set EPD_EC_STORE")
    findings = asyncio.run(examine(config, instances, requests=not no_requests))
    print(as_json(findings) if format == "json" else as_text(findings))
    if worst_verdict(findings) is FAIL:
        sys.exit(1)
