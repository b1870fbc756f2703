"""Command `epd observe`: its flags, and the life of the relay."""

import asyncio
import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import aiohttp
import orjson
import uvloop
from aiohttp import web
from pydantic import SecretStr

from epd.edge.access import is_loopback
from epd.json_or_none import json_or_none
from epd.parser import Commands, Parser, admin_key, http_url
from epd.tools.model_config import config_path, read_config
from epd.tools.observe.counting import Counter, Traffic
from epd.tools.observe.entry_sizes import EntrySizes, entry_sizes
from epd.tools.observe.relay import Relay, Server, drop_added_headers
from epd.tools.observe.report import GIB, as_markdown
from epd.tools.observe.reuse import ReuseDistances
from epd.upstream import KEEP_ALIVE_S

STORE_BYTES = tuple(size * GIB for size in (1, 4, 16, 64))
STORE_ENTRIES = (100, 1_000, 10_000, 100_000)
"""Sizes of stores in the report, if the sizes of entries are not known."""

MIB = 1024**2
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of a header and of a request line, as of vLLM's server."""
MODEL_S = 5.0
"""Seconds in which a server may report its model."""
STOP_S = 10.0
"""Seconds in which requests in progress may end after SIGTERM."""


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Flags of the command, as its help describes them."""

    model_config: str | None
    servers_urls: Sequence[str]
    host: str
    port: int
    max_body_mib: float
    encode_ms: float | None
    report: Path | None


def add_parser(commands: Commands) -> None:
    """Add `observe` to the commands of `epd`."""
    parser = commands.add_parser(
        "observe",
        help="count in front of vLLM servers what an encoder cache would bring",
        description="Relay requests to vLLM servers unchanged, and count which media come again. "
        "The report at the end, and at /observe and /observe.json, says what a store "
        "of each size would have answered, and whether it pays. The servers need no connector. "
        "Nothing of a prompt or of media is kept. EPD_ADMIN_API_KEY or ADMIN_API_KEY is the key "
        "for the report; without one, only this machine gets it, at a --host that is a loopback "
        "address.",
        epilog="example: epd observe --servers-urls http://gpu1:8000,http://gpu2:8000 "
        "--model-config Qwen/Qwen2.5-VL-7B-Instruct --encode-ms 40",
    )
    parser.add_argument(
        "--servers-urls",
        type=_urls,
        required=True,
        metavar="URLS",
        help="base URLs of the vLLM servers, with commas; each request goes to the one with the "
        "fewest in progress",
    )
    parser.add_argument(
        "--model-config",
        metavar="MODEL",
        help="model that gives the sizes of entries by its config.json: name on the hub, or "
        "directory (default: the model that the first server reports; if its config.json cannot be "
        "read here, stores are measured in entries)",
    )
    parser.add_argument(
        "--encode-ms",
        type=_positive,
        metavar="MS",
        help="milliseconds of an encode of one megapixel on your GPU, for estimates of time",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="PORT", help="port to listen on (%(default)s)"
    )
    parser.add_argument(
        "--max-body-mib",
        type=_positive,
        default=64.0,
        metavar="MIB",
        help="larger bodies are relayed and not counted (default: 64)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="file for the report at the end, as JSON"
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: Parser, **flags: Any) -> None:
    settings = ObserveSettings(**flags)
    model = settings.model_config or _served_model(settings.servers_urls[0])
    sizes = None if model is None else _entry_sizes(model)
    if sizes is not None:
        print(f"epd observe: sizes of entries are those of {model}")
    elif settings.model_config is not None:
        parser.error(
            f"--model-config: found no config.json of {model} with the width of a token; without "
            "this flag stores are measured in entries"
        )
    else:
        print("epd observe: stores are measured in entries; --model-config MODEL gives bytes")
    stores = STORE_ENTRIES if sizes is None else STORE_BYTES
    counter = Counter(Traffic(ReuseDistances((*stores, float("inf"))), sizes))
    try:
        uvloop.run(_relay(settings, counter))
    except OSError as error:
        sys.exit(f"epd observe: {error}")


def _served_model(url: str) -> str | None:
    """Return the name on the hub, or the directory, of a server's model; None without an answer."""
    try:
        with build_opener(ProxyHandler({})).open(f"{url}/v1/models", timeout=MODEL_S) as answer:
            document = json_or_none(answer.read())
    except (OSError, HTTPException):
        return None
    match document:
        case {"data": [{"root": str() as model}, *_]}:
            return model
    return None


def _entry_sizes(model: str) -> EntrySizes | None:
    try:
        path = config_path(model, None, os.environ)
        config = read_config(path)
        if path is None or config is None:
            return None
        processor = read_config(path.with_name("preprocessor_config.json"))
        if processor is None:  # of checkpoints since transformers 5
            whole = read_config(path.with_name("processor_config.json")) or {}
            processor = whole.get("image_processor")
    except OSError:  # a server's name of its model may be no path
        return None
    return entry_sizes(config, processor or {})


async def _relay(settings: ObserveSettings, counter: Counter) -> None:
    """Relay until SIGINT or SIGTERM; then print the report, and write it."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    host, port, key = settings.host, settings.port, admin_key()
    async with aiohttp.ClientSession(
        auto_decompress=False,
        # Shorter than the server's, which would close a connection under a request.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        max_field_size=MAX_HEADER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
    ) as session:
        relay = Relay(
            [Server(url) for url in settings.servers_urls],
            counter,
            session,
            int(settings.max_body_mib * MIB),
            admin_key=None if key is None else SecretStr(key),
            private=is_loopback(host),
            encode_ms=settings.encode_ms,
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay.answer)
        app.on_response_prepare.append(drop_added_headers)
        runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            max_field_size=MAX_HEADER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            shutdown_timeout=STOP_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            url = f"http://{host}:{port}"
            print(f"epd observe: {url} relays to {', '.join(settings.servers_urls)}")
            print(f"epd observe: the report is at {url}/observe, and here after Ctrl-C", flush=True)
            await ended.wait()
        finally:
            await runner.cleanup()
    await asyncio.to_thread(counter.close)
    report = await relay.report()
    print(f"\n{as_markdown(report)}", flush=True)
    if settings.report is not None:
        content = orjson.dumps(report, option=orjson.OPT_INDENT_2)
        await asyncio.to_thread(settings.report.write_bytes, content)


def _urls(text: str) -> list[str]:
    urls = [http_url(url.strip()) for url in text.split(",") if url.strip()]
    if not urls:
        raise ArgumentTypeError("name at least one server")
    return urls


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return number
