"""Report of a run: what came again, what a store would have answered, and the verdict. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from epd.tools.observe.counting import Savings, Traffic
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


@dataclass(frozen=True, slots=True)
class Relayed:
    """What the relay knows of the run.

    Attributes:
        seconds: length of the run.
        requests: forwarded requests, of all kinds.
        failed: those that no server answered.
        too_large: those that were too large to be counted.
        dropped: those that were not counted because counting was behind.
        servers: number of servers.
        encode_ms: the user's milliseconds of an encode of one megapixel; None without them.
    """

    seconds: float
    requests: int
    failed: int
    too_large: int
    dropped: int
    servers: int
    encode_ms: float | None


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
    hits: float
    unsent_bytes: float
    encode_s: float | None


@dataclass(frozen=True, slots=True)
class ObserveReport:
    """Report of a run. Figures of repeats are estimates if `sampled_share` is below 1.

    Attributes:
        unsized: media of an unknown entry size, which count as `mean_bytes`.
        unit: of the sizes of stores: `bytes` or `entries`.
        same_conversation: share of the repeats within a conversation.
        other_server: share of the repeats that went to another server than the time before.
    """

    relayed: Relayed
    counted: int
    with_media: int
    unreadable: int
    items: int
    distinct: float
    unsized: int
    mean_bytes: float
    sampled_share: float
    unit: str
    modalities: Sequence[ModalityLine]
    stores: Sequence[StoreLine]
    same_conversation: float
    other_server: float
    verdict: Sequence[str]


def make_report(traffic: Traffic, relayed: Relayed) -> ObserveReport:
    """Return the report of what was counted so far."""
    distances = traffic.distances
    items = distances.references
    sampled = traffic.sampled_repeats or 1.0
    modalities = [
        ModalityLine(
            name,
            kind.items,
            min(kind.repeats / kind.items, 1.0),
            kind.sent_bytes,
            kind.pixels / MEGA,
        )
        for name, kind in sorted(traffic.kinds.items())
    ]
    stores = [_store_line(traffic, size, relayed.encode_ms) for size in distances.sizes]
    pixels = sum(kind.pixels for kind in traffic.kinds.values())
    report = ObserveReport(
        relayed=relayed,
        counted=traffic.requests - traffic.unreadable,
        with_media=traffic.with_media,
        unreadable=traffic.unreadable,
        items=items,
        distinct=distances.distinct,
        unsized=traffic.unsized,
        mean_bytes=traffic.mean_bytes,
        sampled_share=distances.share,
        unit="entries" if traffic.sizes is None else "bytes",
        modalities=modalities,
        stores=stores,
        same_conversation=traffic.same_conversation / sampled,
        other_server=traffic.other_server / sampled,
        verdict=(),
    )
    return replace(report, verdict=tuple(_verdict(report, pixels)))


def _store_line(traffic: Traffic, size: float, encode_ms: float | None) -> StoreLine:
    distances, saved = traffic.distances, traffic.savings.get(size, Savings())
    hits = distances.hits(size)
    # The sample gives the means; the number of hits is adjusted.
    scale = hits / (distances.sampled_hits(size) or 1.0)
    return StoreLine(
        None if size == float("inf") else size,
        hits / (distances.references or 1),
        hits,
        scale * saved.sent_bytes,
        None if encode_ms is None else scale * saved.pixels / MEGA * encode_ms / 1000,
    )


def _verdict(report: ObserveReport, pixels: float) -> Iterator[str]:
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
        yield _on_encode_instances(report, pixels, unlimited)
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
    if 2 * report.unsized > report.items:
        yield "The sizes of most entries are not known, so the size of this store is a guess."
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
    yield _on_encode_instances(report, pixels, store)
    yield _next_command(report, pixels, store)


def _on_encode_instances(report: ObserveReport, pixels: float, store: StoreLine) -> str:
    """Return whether encode instances would pay beside this store."""
    busy = _encoding_share(report, pixels, store)
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


def _encoding_share(report: ObserveReport, pixels: float, store: StoreLine) -> float | None:
    """Return the share of each server's time that encodes beside this store take, if known."""
    encode_ms, seconds = report.relayed.encode_ms, report.relayed.seconds
    if encode_ms is None or not pixels:
        return None
    encodes_s = pixels / MEGA * encode_ms / 1000 - (store.encode_s or 0.0)
    return encodes_s / max(seconds, 1e-9) / report.relayed.servers


def _next_command(report: ObserveReport, pixels: float, store: StoreLine) -> str:
    size = store.size if report.unit == "bytes" else None
    memory = f" --ec-store-memory {size / GIB:g}GiB" if size else ""
    servers = report.relayed.servers
    if (_encoding_share(report, pixels, store) or 0.0) >= BUSY:
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


def as_markdown(report: ObserveReport) -> str:
    """Return the report as Markdown."""
    relayed = report.relayed
    lines = [
        "# What an encoder cache would bring",
        "",
        *(f"- {sentence}" for sentence in report.verdict),
        "",
        (
            f"{relayed.requests} requests in {relayed.seconds:.0f} s to {relayed.servers} servers; "
            f"{report.counted} counted, {report.with_media} with media. Not counted: "
            f"{relayed.too_large} too large, {relayed.dropped} while counting was behind, "
            f"{report.unreadable} in a form that this project rejects. "
            f"{relayed.failed} had no complete answer."
        ),
        "",
        (
            f"{report.items} media, about {report.distinct:.0f} different ones. Of the repeats "
            f"{report.same_conversation:.0%} came within a conversation, and "
            f"{report.other_server:.0%} went to another server than the time before."
        ),
    ]
    if report.sampled_share < 1:
        lines += ["", f"Repeats are estimated from {report.sampled_share:.1%} of the media."]
    if report.unsized:
        lines += [
            "",
            (
                f"{report.unsized} media have no known entry size, and count as "
                f"{bytes_text(report.mean_bytes)}. Servers report sizes with vLLM's "
                "--enable-prompt-tokens-details; for streams add --enable-force-include-usage."
            ),
        ]
    lines += ["", "| media | number | came again | in requests | megapixels |"]
    lines.append("| --- | --- | --- | --- | --- |")
    lines += [
        f"| {line.modality} | {line.items} | {line.repeat_share:.0%} | "
        f"{bytes_text(line.sent_bytes)} | {line.megapixels:.1f} |"
        for line in report.modalities
    ]
    lines += ["", "| store | hit rate | not sent to engines | encodes saved |"]
    lines.append("| --- | --- | --- | --- |")
    lines += [
        f"| {size_text(line.size, report.unit)} | {line.hit_rate:.1%} | "
        f"{bytes_text(line.unsent_bytes)} | "
        f"{'not known' if line.encode_s is None else f'{line.encode_s:.0f} s'} |"
        for line in report.stores
    ]
    return "\n".join(lines) + "\n"
