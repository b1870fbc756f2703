"""Report of a run: what came again, what a store would have answered, and the verdict. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from epd.tools.observe.counting import Traffic
from epd.ui.formats import bytes_text

MEGA = 10**6
GIB = 2**30

LEAST_HIT_RATE = 0.1
"""Hit rate below which the verdict is against a store: each miss is written once more, and one
encode of ten is saved at most."""

NEARLY_ALL = 0.9
"""Share of the most possible hits for which the smallest sufficient store is recommended; and share
of repeats within a conversation above which an engine's own caches may answer most."""

BUSY = 0.1
"""Share of a server's time in encodes above which encode instances pay by sparing decode."""


@dataclass(slots=True)
class Relayed:
    """What the relay knows of the run.

    Attributes:
        servers: number of servers.
        encode_ms: the user's milliseconds of an encode of one megapixel; None without them.
        seconds: length of the run.
        requests: forwarded requests, of all kinds.
        failed: those that no server answered.
        too_large: those that were too large to be counted.
        dropped: those that were not counted because counting was behind.
    """

    servers: int
    encode_ms: float | None = None
    seconds: float = 0.0
    requests: int = 0
    failed: int = 0
    too_large: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ModalityLine:
    """Media of one kind."""

    modality: str
    items: int
    repeat_share: float
    sent_bytes: int
    megapixels: float


@dataclass(frozen=True, slots=True)
class StoreLine:
    """What a store of one size would have answered.

    Attributes:
        size: bytes, or number of entries; None for a store without a limit.
        hit_rate: share of the items.
        unsent_bytes: bytes of media, in base64, that it would have kept from the engines.
        encode_s: estimated seconds of encodes; None without the user's figure.
    """

    size: float | None
    hit_rate: float
    hits: int
    unsent_bytes: int
    encode_s: float | None


@dataclass(frozen=True, slots=True)
class ObserveReport:
    """Report of a run.

    Attributes:
        unit: of the sizes of stores: `bytes` or `entries`.
        same_conversation: share of the repeats within a conversation.
        other_server: share of the repeats that went to another server than the time before.
    """

    relayed: Relayed
    counted: int
    with_media: int
    unreadable: int
    items: int
    distinct: int
    unsized: int
    unit: str
    modalities: Sequence[ModalityLine]
    stores: Sequence[StoreLine]
    same_conversation: float
    other_server: float
    verdict: Sequence[str] = ()


def make_report(traffic: Traffic, relayed: Relayed) -> ObserveReport:
    """Return the report of what was counted so far."""
    items = sum(kind.items for kind in traffic.kinds.values())
    repeats = traffic.caches[-1].hits
    report = ObserveReport(
        relayed=relayed,
        counted=traffic.requests - traffic.unreadable,
        with_media=traffic.with_media,
        unreadable=traffic.unreadable,
        items=items,
        distinct=items - repeats,
        unsized=traffic.unsized,
        unit="entries" if traffic.sizes is None else "bytes",
        modalities=[
            ModalityLine(
                name, kind.items, kind.repeats / kind.items, kind.sent_bytes, kind.pixels / MEGA
            )
            for name, kind in sorted(traffic.kinds.items())
        ],
        stores=[
            StoreLine(
                None if cache.size == math.inf else cache.size,
                cache.hits / (items or 1),
                cache.hits,
                cache.unsent_bytes,
                None
                if relayed.encode_ms is None
                else cache.saved_pixels / MEGA * relayed.encode_ms / 1000,
            )
            for cache in traffic.caches
        ],
        same_conversation=traffic.same_conversation / (repeats or 1),
        other_server=traffic.other_server / (repeats or 1),
    )
    return replace(report, verdict=tuple(_verdict(report)))


def _verdict(report: ObserveReport) -> Iterator[str]:
    """Yield the sentences of the verdict."""
    if not report.items:
        yield "No request had media. An encoder cache brings nothing here."
        return
    unlimited, unit = report.stores[-1], report.unit
    if unlimited.hit_rate < LEAST_HIT_RATE:
        yield (
            f"{unlimited.hit_rate:.0%} of the media came again. A store of any size does not pay "
            "here: plain vLLM is the better choice."
        )
        yield _on_encode_instances(report, unlimited)
        return
    sufficient = (
        line for line in report.stores if line.hit_rate >= NEARLY_ALL * unlimited.hit_rate
    )
    store = next(sufficient)
    yield (
        f"{unlimited.hit_rate:.0%} of the media came again. A store of "
        f"{size_text(store.size, unit)} would have answered {store.hit_rate:.0%} of all media, and "
        f"{bytes_text(store.unsent_bytes)} would not have been sent to an engine."
    )
    if store.encode_s is not None:
        yield (
            f"It would have saved {store.encode_s:.0f} s of encodes in "
            f"{report.relayed.seconds:.0f} s, by your {report.relayed.encode_ms:g} ms for each of "
            "its megapixels."
        )
    if report.same_conversation - report.other_server > NEARLY_ALL:
        yield (
            "Nearly all repeats are turns of a conversation at the same server. Its prefix cache "
            "answers those that it still has, so the gain is less than this."
        )
    elif report.relayed.servers > 1:
        yield (
            f"{report.other_server:.0%} of the repeats went to another server than the time "
            "before: no cache within an engine answers them, one store for all servers does."
        )
    yield _on_encode_instances(report, store)
    yield _next_command(report, store)


def _on_encode_instances(report: ObserveReport, store: StoreLine) -> str:
    """Return whether encode instances would pay beside this store."""
    busy = _encoding_share(report, store)
    if busy is None:
        return (
            "Whether encode instances would pay is not known: give --encode-ms, the milliseconds "
            "of an encode of one megapixel on your GPU."
        )
    if busy < BUSY:
        return f"Encode instances would not pay: encodes take {busy:.1%} of each server's time."
    return (
        f"Encode instances would pay: encodes that are left take {busy:.0%} of each server's time, "
        "in which its requests in decode wait."
    )


def _encoding_share(report: ObserveReport, store: StoreLine) -> float | None:
    """Return the share of each server's time that encodes beside this store take, if known."""
    encode_ms, seconds = report.relayed.encode_ms, report.relayed.seconds
    megapixels = sum(line.megapixels for line in report.modalities)
    if encode_ms is None or not megapixels:
        return None
    encodes_s = megapixels * encode_ms / 1000 - (store.encode_s or 0.0)
    return encodes_s / max(seconds, 1e-9) / report.relayed.servers


def _next_command(report: ObserveReport, store: StoreLine) -> str:
    size = store.size if report.unit == "bytes" else None
    memory = f" --ec-store-memory {size / GIB:g}GiB" if size else ""
    servers = report.relayed.servers
    if (_encoding_share(report, store) or 0.0) >= BUSY:
        return (
            f"Next: epd up --model MODEL --topology 1e{servers}pd{memory}, and send it the same "
            "requests."
        )
    return (
        f"Next: epd up --model MODEL --topology {servers}epd{memory}, and send it the same "
        "requests; or add the store to the servers as they run (docs/guides/your-servers.md)."
    )


def size_text(size: float | None, unit: str) -> str:
    """Return the size of a store as people write it."""
    if size is None:
        return "any size"
    return f"{size / GIB:g} GiB" if unit == "bytes" else f"{size:,.0f} entries"


def _paragraphs(report: ObserveReport) -> Iterator[str]:
    relayed = report.relayed
    yield (
        f"{relayed.requests} requests in {relayed.seconds:.0f} s to {relayed.servers} servers; "
        f"{report.counted} counted, {report.with_media} with media. Not counted: "
        f"{relayed.too_large} too large, {relayed.dropped} while counting was behind, "
        f"{report.unreadable} in a form that this project rejects. "
        f"{relayed.failed} had no complete answer."
    )
    yield (
        f"{report.items} media, {report.distinct} different ones. Of the repeats "
        f"{report.same_conversation:.0%} came within a conversation, and "
        f"{report.other_server:.0%} went to another server than the time before."
    )
    if report.unsized:
        yield f"{report.unsized} media have no known entry size; they count as the mean."


def as_markdown(report: ObserveReport) -> str:
    """Return the report as Markdown."""
    media = [
        (
            line.modality,
            str(line.items),
            f"{line.repeat_share:.0%}",
            bytes_text(line.sent_bytes),
            f"{line.megapixels:.1f}",
        )
        for line in report.modalities
    ]
    stores = [
        (
            size_text(line.size, report.unit),
            f"{line.hit_rate:.1%}",
            bytes_text(line.unsent_bytes),
            "not known" if line.encode_s is None else f"{line.encode_s:.0f} s",
        )
        for line in report.stores
    ]
    parts = [
        "# What an encoder cache would bring",
        "\n".join(f"- {sentence}" for sentence in report.verdict),
        *_paragraphs(report),
        _table(("media", "number", "came again", "in requests", "megapixels"), media),
        _table(("store", "hit rate", "not sent to engines", "encodes saved"), stores),
    ]
    return "\n\n".join(parts) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
