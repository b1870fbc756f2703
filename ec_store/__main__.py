"""Command-line interface `ec-store`, also `python -m ec_store`: lists, checks and serves stores."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from ec_store.arena.sockets import SYSTEM, find_sockets, runtime_folder
from ec_store.base import Listed, MemoryStats, Store
from ec_store.config import duration_s, octal, redacted, size_bytes, size_text
from ec_store.disk.config import NAME, DiskConfig, StoreSettings
from ec_store.disk.store import SharedDiskStore
from ec_store.errors import StoreError, StoreMissing
from ec_store.extras import importing
from ec_store.opening import open_store
from ec_store.version import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Exits with 1 if the store cannot be used or `verify` found corrupt entries, and with 2 if the
    command line is invalid.
    """
    args = make_parser().parse_args(argv)
    try:
        sys.exit(max(_run(args, url) for url in _urls(args)))
    except ValueError as error:
        print(f"ec-store: error: {error}", file=sys.stderr)
        sys.exit(2)
    except StoreError as error:
        sys.exit(f"ec-store: {error}")


def _run(args: argparse.Namespace, url: str) -> int:
    args.url = url
    with open_store(url, create=args.create, lazy=args.lazy) as store:
        result: int = args.run(store, args)
        return result


def _urls(args: argparse.Namespace) -> list[str]:
    """Return the URL of the command line, or those of the memories of this host.

    Raises:
        ValueError: several servers run, and the command is for one store.
        StoreMissing: none runs.
    """
    if args.url is not None:
        return [args.url]
    found = [f"shm://{quote(str(path))}" for path in find_sockets()]
    if not found:
        raise StoreMissing(
            f"found no server of a memory in {runtime_folder()} or {SYSTEM}: name the URL of a "
            "store, or run this command as the user of the server"
        )
    if len(found) > 1 and not args.several:
        raise ValueError(f"several memories are served here, name one: {' '.join(found)}")
    return found


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="ec-store",
        description="Inspect and maintain an encoder store.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ec-store {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[..., int], text: str, *, create: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        found = "" if create else " (default: the memory that a server has on this host)"
        url = f"file:///path, shm:///path, redis://…{found}"
        added.add_argument("url", metavar="URL", nargs=None if create else "?", help=url)
        added.add_argument("--json", action="store_true", help="print JSON, one object per line")
        added.set_defaults(run=run, create=create, lazy=False, several=False)
        return added

    stat = command("stat", _stat, "show the metrics of a store, and the models that use it")
    stat.set_defaults(several=True)
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
    text = "keep a store within its quota, and serve its metrics over HTTP"
    serve = command("serve", _serve, text, create=True)
    # Defaults as text, which argparse parses as it parses arguments.
    for flag, parse, default, meaning in (
        ("--host", str, "127.0.0.1", "address to listen on"),
        ("--port", int, "8100", "port to listen on"),
        ("--interval-s", float, "10", "seconds between two checks of the quota"),
    ):
        help_text = f"{meaning} (default {default})"
        serve.add_argument(flag, type=parse, default=default, help=help_text)
    tier = (
        "store behind the memory of a shm:// URL, in which missing entries are looked up: first "
        "file:///path, a directory of this host that gets what is used twice, then redis://… or "
        "mooncake://…, which servers of other hosts have too and which gets all entries. "
        "Repeatable (default none)"
    )
    serve.add_argument("--tier", metavar="URL", action="append", default=[], help=tier)
    _add_listening(serve)
    return parser


def _add_listening(serve: argparse.ArgumentParser) -> None:
    listen = (
        "address at which proxies of other hosts look up, lease and claim entries of the memory, "
        "with EC_STORE_API_KEY; no entry passes over it (default none)"
    )
    certificate = "certificate of --listen, and its chain; read again at SIGHUP (default: no TLS)"
    for flag, metavar, text in (
        ("--listen", "HOST:PORT", listen),
        ("--advertise", "HOST:PORT", "address at which proxies reach --listen (default: the same)"),
        ("--ssl-certfile", "FILE", certificate),
        ("--ssl-keyfile", "FILE", "private key of the certificate, without passphrase"),
    ):
        serve.add_argument(flag, metavar=metavar, help=text)


def _add_settings(configure: argparse.ArgumentParser) -> None:
    share = "upper bound of the store's share of its file system, from 0 to 1"
    for flag, parse, metavar, text in (
        ("--max-bytes", size_bytes, "SIZE", "quota, such as 64GiB"),
        ("--max-share", float, "SHARE", share),
        ("--ttl", duration_s, "TIME", "time after which an unused entry expires, such as 7d"),
        ("--dir-mode", octal, "MODE", "permissions of new folders, such as 2770, and files"),
    ):
        configure.add_argument(flag, type=partial(_parsed, parse), metavar=metavar, help=text)


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _stat(store: Store, args: argparse.Namespace) -> int:
    stats, namespaces = store.stats(), dict(store.namespaces())
    lines = [
        f"store      {redacted(args.url)}",
        f"entries    {_shown(stats.entries, '{:,}'.format)}",
        f"bytes      {_shown(stats.bytes, size_text)}",
        f"max_bytes  {_shown(stats.max_bytes, size_text)}",
        f"leased     {_shown(stats.leased, '{:,}'.format)}",
    ]
    if stats.memory is not None:
        lines += _memory_lines(stats.memory)
    for scheme, tier in stats.tiers.items():
        names = ("sent", "fetched", "queued", "drops", "errors")
        lines.append(f"{scheme:10} " + ", ".join(f"{tier[name]:,} {name}" for name in names))
    lines += [f"model      {model}: {namespace}" for model, namespace in namespaces.items()]
    shown = {"url": redacted(args.url), **asdict(stats), "namespaces": namespaces}
    _print_result(args, shown, "\n".join(lines))
    return 0


def _memory_lines(memory: MemoryStats) -> list[str]:
    pinned = size_text(memory.pinned_bytes)
    if memory.pinned_bytes:
        pinned += f", the oldest pin for {memory.oldest_pin_s:.0f} s"
    return [
        f"pages      {memory.pages}",
        f"clients    {memory.clients:,}",
        f"pinned     {pinned}",
        f"begun      {size_text(memory.begun_bytes)}",
        f"gone       {size_text(memory.gone_bytes)}",
        f"refused    {memory.refused:,}",
        f"saved      {memory.saved_s:,.1f} s of encoding",
        f"evicts by  {memory.evicts_by}",
        *(
            f"process    {use.role} {use.pid}: {size_text(use.pinned_bytes)} pinned, "
            f"{size_text(use.begun_bytes)} begun"
            for use in memory.uses
        ),
    ]


def _ls(store: Store, args: argparse.Namespace) -> int:
    # Sorting needs all rows: lines are kept instead, which take a third of the memory.
    show = _as_json if args.json else _as_text
    for _, line in sorted((row.used_s or 0.0, show(row)) for row in store.ls()):
        print(line)
    return 0


def _verify(store: Store, args: argparse.Namespace) -> int:
    corrupt = checked = skipped = 0
    for row in store.verify(fix=args.fix):
        checked += 1
        corrupt += row.problem is not None
        skipped += row.skipped is not None
        if row.problem is not None or row.skipped is not None:
            print(_as_json(row) if args.json else _as_text(row))
    fixed = corrupt if args.fix else 0
    text = f"{checked:,} entries read, {corrupt} corrupt{', deleted' if fixed else ''}"
    if skipped:
        text += f", {skipped} of other formats, not checked and kept"
    result = {"checked": checked, "corrupt": corrupt, "fixed": fixed, "skipped": skipped}
    _print_result(args, result, text)
    return 1 if corrupt and not fixed else 0


def _gc(store: Store, args: argparse.Namespace) -> int:
    removed = store.sweep()
    own = "" if isinstance(store, SharedDiskStore) else ": its server evicts by itself"
    _print_result(args, {"removed": removed}, f"{removed:,} entries removed{own}")
    return 0


def _purge(store: Store, args: argparse.Namespace) -> int:
    removed = store.purge(args.namespace)
    text = f"{removed:,} entries of {args.namespace} removed"
    _print_result(args, {"removed": removed}, text)
    return 0


def _configure(store: Store, args: argparse.Namespace) -> int:
    if not isinstance(store, SharedDiskStore):
        text = (
            "ec-store: error: only a store in a directory has settings of its own: Redis is "
            "configured with maxmemory and maxmemory-policy, a memory in the URL of its server"
        )
        print(text, file=sys.stderr)
        return 2
    arguments = {each.name: getattr(args, each.name) for each in fields(StoreSettings)}
    changes = {name: value for name, value in arguments.items() if value is not None}
    if not changes:
        # Only a change creates a store: a mistyped path must not look like one.
        with SharedDiskStore.from_url(args.url, create=False) as existing:
            settings = existing.settings
    else:
        path = DiskConfig.from_url(args.url).path
        created = not Path(path, NAME).exists()
        settings = store.configure(**changes)
        if created:
            print(f"ec-store: created a store in {path}, which had none", file=sys.stderr)
    lines = [f"{name:10} {value}" for name, value in settings.shown_settings().items()]
    _print_result(args, asdict(settings), "\n".join(lines))
    return 0


def _serve(store: Store, args: argparse.Namespace) -> int:
    with importing("serve"):
        from ec_store.serve import serve  # noqa: PLC0415

    return serve(store, args)


def _as_json(row: Listed) -> str:
    info = row.info
    described: dict[str, Any] = {
        "digest": row.digest,
        "size_bytes": row.size_bytes,
        "used_s": row.used_s,
        "problem": row.problem,
        "skipped": row.skipped,
    }
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
    used = "-"
    if row.used_s is not None:
        used = datetime.fromtimestamp(row.used_s, UTC).isoformat(timespec="seconds")
    shape = "" if info is None else "x".join(map(str, info.shape))
    what = "" if info is None else f"{info.modality:5} {info.dtype:4} {shape:>12}  "
    name = "" if info is None else f"{info.key.namespace}  {info.key.identifier!r}"
    problem = f"  CORRUPT: {row.problem}" if row.problem else ""
    if row.skipped:
        problem = f"  SKIPPED: {row.skipped}"
    return f"{row.digest[:16]}  {what}{size_text(row.size_bytes):>10}  {used}  {name}{problem}"


def _shown(value: int | None, show: Callable[[int], str]) -> str:
    return "unknown" if value is None else show(value)


def _print_result(args: argparse.Namespace, result: Any, text: str) -> None:
    print(orjson.dumps(result).decode() if args.json else text)


if __name__ == "__main__":
    main()
