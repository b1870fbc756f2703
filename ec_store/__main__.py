"""Command-line interface `ec-store`, also `python -m ec_store`: lists, checks and serves stores."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web
from rich.console import Console
from rich.progress import track

from ec_store.aio import AsyncStore
from ec_store.base import Listed, Store
from ec_store.config import duration_s, octal, size_bytes, size_text
from ec_store.disk.config import GivenSettings
from ec_store.disk.store import SharedDiskStore
from ec_store.errors import StoreError
from ec_store.opening import open_store
from ec_store.service import create_app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Exits with 1 if the store cannot be used or `verify` found corrupt entries, and with 2 if the
    command line is invalid.
    """
    args = make_parser().parse_args(argv)
    try:
        with open_store(args.url, create=args.create, lazy=args.lazy) as store:
            sys.exit(args.run(store, args))
    except ValueError as error:
        print(f"ec-store: error: {error}", file=sys.stderr)
        sys.exit(2)
    except StoreError as error:
        sys.exit(f"ec-store: {error}")


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="ec-store",
        description="Inspect and maintain an encoder store.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ec-store {version('epd-proxy')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[..., int], text: str, *, create: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.add_argument("url", metavar="URL", help="file:///path, redis://…, rediss://…")
        added.add_argument("--json", action="store_true", help="print JSON, one object per line")
        added.set_defaults(run=run, create=create, lazy=False)
        return added

    command("stat", _stat, "show the metrics of a store, and the models that use it")
    command("ls", _ls, "list every entry, the least recently used first")
    verify = command("verify", _verify, "read every entry whole and list the corrupt ones")
    verify.add_argument("--fix", action="store_true", help="delete the corrupt ones")
    command("gc", _gc, "bring a store under its quota now, and remove files that crashes left")
    purge = command("purge", _purge, "delete all entries of a namespace")
    purge.add_argument("--namespace", required=True, help="namespace, as `ec-store stat` shows it")
    configure = command(
        "configure",
        _configure,
        "show or change the settings of a store in a directory; they apply to every process that "
        "opens it",
        create=True,
    )
    configure.set_defaults(lazy=True)  # it repairs settings that prevent the store from opening
    _add_settings(configure)
    serve = command(
        "serve",
        _serve,
        "keep a store within its quota, and serve its metrics over HTTP",
        create=True,
    )
    _add_service_flags(serve)
    return parser


def _add_settings(configure: argparse.ArgumentParser) -> None:
    configure.add_argument(
        "--max-bytes", type=size_bytes, metavar="SIZE", help="quota, such as 64GiB"
    )
    configure.add_argument(
        "--max-share",
        type=float,
        metavar="SHARE",
        help="upper bound of the store's share of its file system, from 0 to 1",
    )
    configure.add_argument(
        "--ttl",
        type=duration_s,
        metavar="TIME",
        help="time after which an unused entry expires, such as 7d",
    )
    configure.add_argument(
        "--dir-mode", type=octal, metavar="MODE", help="permissions of new folders, such as 2770"
    )
    configure.add_argument(
        "--file-mode", type=octal, metavar="MODE", help="permissions of new files, such as 0660"
    )


def _add_service_flags(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    serve.add_argument("--port", type=int, default=8100, help="port to listen on (default 8100)")
    serve.add_argument(
        "--interval-s",
        type=float,
        default=10.0,
        help="seconds between two checks of the quota (default 10)",
    )


def _stat(store: Store, args: argparse.Namespace) -> int:
    figures = asdict(store.stats()) | {"namespaces": dict(store.namespaces())}
    if args.json:
        _print_json(figures)
        return 0
    for name in ("entries", "bytes", "max_bytes"):
        value = figures[name]
        shown = (
            "unknown" if value is None else size_text(value) if "bytes" in name else f"{value:,}"
        )
        print(f"{name:10} {shown}")
    for model, namespace in figures["namespaces"].items():
        print(f"{'model':10} {model}: {namespace}")
    return 0


def _ls(store: Store, args: argparse.Namespace) -> int:
    # Sorting needs all rows: lines are kept instead, which take a third of the memory.
    show = _as_json if args.json else _as_text
    for _, line in sorted((row.used_s or 0.0, show(row)) for row in store.ls()):
        print(line)
    return 0


def _verify(store: Store, args: argparse.Namespace) -> int:
    rows = checked = 0
    for row in _progress(store.verify(fix=args.fix), store.stats().entries, "reading"):
        checked += 1
        if row.problem is not None:
            rows += 1
            print(_as_json(row) if args.json else _as_text(row))
    if args.json:
        _print_json({"checked": checked, "corrupt": rows, "fixed": rows if args.fix else 0})
    else:
        print(f"{checked:,} entries read, {rows} corrupt{', deleted' if rows and args.fix else ''}")
    return 1 if rows and not args.fix else 0


def _gc(store: Store, args: argparse.Namespace) -> int:
    removed = store.sweep()
    if args.json:
        _print_json({"removed": removed})
    else:
        print(f"{removed:,} entries removed")
    return 0


def _purge(store: Store, args: argparse.Namespace) -> int:
    removed = store.purge(args.namespace)
    if args.json:
        _print_json({"removed": removed})
    else:
        print(f"{removed:,} entries of {args.namespace} removed")
    return 0


def _configure(store: Store, args: argparse.Namespace) -> int:
    if not isinstance(store, SharedDiskStore):
        text = "ec-store: error: Redis is configured with its own maxmemory and maxmemory-policy"
        print(text, file=sys.stderr)
        return 2
    given = GivenSettings(
        max_bytes=args.max_bytes,
        max_share=args.max_share,
        ttl=args.ttl,
        dir_mode=args.dir_mode,
        file_mode=args.file_mode,
    )
    if given == GivenSettings():
        store.check()
    settings = store.settings if given == GivenSettings() else store.configure(given)
    if args.json:
        _print_json(asdict(settings))
        return 0
    for name, value in settings.shown_settings().items():
        print(f"{name:10} {value}")
    return 0


def _serve(store: Store, args: argparse.Namespace) -> int:
    app = create_app(
        AsyncStore(store),
        interval_s=args.interval_s,
        api_key=os.environ.get("EC_STORE_API_KEY", ""),
    )
    web.run_app(app, host=args.host, port=args.port, access_log=None)
    return 0


def _progress(rows: Iterator[Listed], total: int | None, what: str) -> Iterator[Listed]:
    """Yield the rows, with a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    yield from track(
        rows, what, total=total, console=console, disable=not console.is_terminal, transient=True
    )


def _as_json(row: Listed) -> str:
    described: dict[str, Any] = {
        "digest": row.digest,
        "size_bytes": row.size_bytes,
        "used_s": row.used_s,
        "problem": row.problem,
    }
    info = row.info
    if info is not None:
        described |= {
            "namespace": info.key.namespace,
            "identifier": info.key.identifier.encode("utf-8", "replace").decode(),
            "dtype": info.dtype,
            "shape": info.shape,
            "modality": info.modality,
            "metadata": info.metadata,
        }
    return orjson.dumps(described).decode()


def _as_text(row: Listed) -> str:
    info = row.info
    used = "-" if row.used_s is None else _time(row.used_s)
    shape = "" if info is None else "x".join(map(str, info.shape))
    what = "" if info is None else f"{info.modality:5} {info.dtype:4} {shape:>12}  "
    name = "" if info is None else f"{info.key.namespace}  {info.key.identifier!r}"
    problem = f"  CORRUPT: {row.problem}" if row.problem else ""
    return f"{row.digest[:16]}  {what}{size_text(row.size_bytes):>10}  {used}  {name}{problem}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _print_json(value: Any) -> None:
    print(orjson.dumps(value).decode())


if __name__ == "__main__":
    main()
