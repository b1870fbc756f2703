"""Layout of a frame of `epd top` for any terminal size: numbers, sparklines, bars, tables. Pure."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from epd.ui.formats import bytes_text, plural, rate_text, seconds_text
from epd.ui.recent import Notice, Outcome, RecentRequest
from epd.ui.state import WORST, Durations, InstanceShown, StageShown, StoreShown, UiState

BLOCKS = " ▁▂▃▄▅▆▇█"


def strip_control(text: str) -> str:
    """Return external text without control characters of terminals."""
    return "".join(character if character.isprintable() else "·" for character in text)


def clock(unix_s: float) -> str:
    """Return the local time of day of a Unix time."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def spark(values: Sequence[float]) -> str:
    """Return a sparkline: one block per value, scaled to the largest value."""
    top = max(values, default=0) or 1
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in values)


def bar(part: float, width: int) -> str:
    """Return a bar for a share from 0 to 1, over `width` cells in steps of an eighth."""
    eighths = round(min(1.0, max(0.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


SHOWN = 20
"""Number of requests, and of errors and changes, in a frame without a height."""
STATES = {
    "healthy": ("●", "green", "healthy"),
    "trial": ("◆", "yellow", "on trial"),
    "ejected": ("▲", "dark_orange", "ejected"),
    "down": ("✕", "red", "down"),
}
COLORS = {
    "queue": "bright_black",
    "store": "yellow",
    "encode": "magenta",
    "prefill": "blue",
    "decode": "cyan",
    "release": "bright_magenta",
}
OUTCOMES: Mapping[Outcome, str] = {"ok": "", "rejected": "yellow", "left": "dim", "failed": "red"}
BAR = 6
STORE_BAR = 12
SHOWN_STORES = 2
"""Number of stores in a frame with a height."""
TALL = 20
"""Minimum height of a frame with durations and stores, in lines."""
SPARK = 12
"""Number of seconds in the graph of requests."""
MIN_BARS = 10
WIDE = 80
"""Minimum width of a frame with the latencies of instances, in columns."""
WITH_CAUSES = 120
"""Minimum width of a frame with the causes of states, in columns."""
CAUSE = 26
"""Width of a cause, in columns."""
BUSY = 4
"""Minimum upper end of the scale for running requests."""


class Room(NamedTuple):
    """Number of lines of each part of a frame, its title included."""

    instances: int
    stages: int
    notices: int
    requests: int


def frame(
    state: UiState | None, width: int, height: int | None, failure: str = ""
) -> RenderableType:
    """Return a whole frame of `width` columns and `height` lines; None: no limit.

    `state` is None before the first one; `failure` says why the proxy did not answer since.
    """
    if state is None:
        return Text(strip_control(failure) or "waiting", "red" if failure else "")
    stages = [stage for stage in state["stages"] if stage["count"]]
    console = Console(width=width)
    lines = [*_head(state, failure)]
    if height is None or height >= TALL:
        lines += _durations(state)
        lines += _stores(state["stores"], None if height is None else SHOWN_STORES)
    head = [part for line in lines for part in line.wrap(console, width)]
    room = _room(state, len(stages), None if height is None else height - len(head))
    parts: list[RenderableType] = [*head]
    parts += _instances(state["instances"], room.instances, width)
    parts += _stages(stages, room.stages)
    parts += _notices(state["notices"], room.notices)
    parts += _requests(state["requests"], room.requests, width)
    return Group(*parts)


def _room(state: UiState, stages: int, left: int | None) -> Room:
    instances, notices = len(state["instances"]) + 1, len(state["notices"]) + 1
    if left is None:
        return Room(instances, stages + 1, min(notices, SHOWN), SHOWN)
    shown = Room(min(instances, max(4, left // 3)), min(stages + 1, left // 3), 0, 0)
    left -= shown.instances + shown.stages
    some = min(notices, max(2, left // 3)) if notices > 1 else 0
    return shown._replace(notices=some, requests=left - some)


def _head(state: UiState, failure: str) -> Iterable[Text]:
    yield Text.assemble(
        ("EPD proxy ", "bold"),
        f"{state['version']}  {state['topology']}  {plural(state['workers'], 'worker')}  ",
        (f"no answer: {strip_control(failure)}", "red")
        if failure
        else (clock(state["now"]), "dim"),
    )
    for parts in state["summary"]:
        yield Text.assemble(
            *((strip_control(part), "bold" if at % 2 else "") for at, part in enumerate(parts))
        )
    totals, minute = state["totals"], state["minute"]
    failed, rejected = minute["failed"], minute["rejected"]
    yield Text.assemble(
        (f"{rate_text(state['per_s'])}/s ", "bold"),
        (spark([second["requests"] for second in state["seconds"][-SPARK:]]), "cyan"),
        f" {totals['in_flight']:,} in flight, {totals['queued']:,} queued; last minute: ",
        (f"{failed:,} failed", "bold red" if failed else "dim"),
        ", ",
        (f"{rejected:,} rejected", "yellow" if rejected else "dim"),
    )


def _durations(state: UiState) -> Iterable[Text]:
    shown = Text()
    if (stream := state["first_token"])["count"]:
        shown.append_text(_quantiles("TTFT", stream))
        shown.append(f" of {plural(stream['count'], 'stream')}; ")
    if (whole := state["answered"])["count"]:
        shown.append_text(_quantiles("request", whole))
    if shown:
        yield shown


def _quantiles(title: str, shown: Durations) -> Text:
    p50, p90 = seconds_text(shown["p50_s"]), seconds_text(shown["p90_s"])
    return Text.assemble(f"{title} ", (f"p50 {p50}, p90 {p90}", "bold"))


def _stores(stores: Sequence[StoreShown], most: int | None) -> Iterable[Text]:
    for store in stores[:most]:
        yield _store(store)
    if most is not None and len(stores) > most:
        yield Text(f"and {plural(len(stores) - most, 'store')} more", "dim")


def _store(store: StoreShown) -> Text:
    used_bytes, quota_bytes = store["bytes"], store["max_bytes"]
    name = f"Store {strip_control(store['name'])} "
    bypassed = ", requests bypass it" if store["bypassed"] else ""
    if not store["known"] or used_bytes is None:
        return Text.assemble(name, (f"unknown: no figures from the store{bypassed}", "yellow"))
    graph, size = "", f"{bytes_text(used_bytes)}, no quota"
    if quota_bytes:
        graph = f"{bar(used_bytes / quota_bytes, STORE_BAR):░<{STORE_BAR}} "
        size = f"{bytes_text(used_bytes)} of {bytes_text(quota_bytes)}"
    entries, evictions = store["entries"], store["evictions"]
    facts = [
        "entries unknown" if entries is None else f"{entries:,} entries",
        "evictions unknown" if evictions is None else plural(evictions, "eviction"),
    ]
    return Text.assemble(name, (graph, "yellow"), (size, "bold"), ", ", ", ".join(facts), bypassed)


def _instances(
    instances: Sequence[InstanceShown], room: int, width: int
) -> Iterable[RenderableType]:
    # If the lines do not suffice: unhealthy instances first, then those with the most requests.
    chosen = sorted(
        instances, key=lambda instance: (-WORST.index(instance["state"]), -instance["requests"])
    )
    hidden = len(chosen) > room - 1
    shown = {id(instance) for instance in (chosen[: room - 2] if hidden else chosen)}
    most = max([BUSY, *(instance["requests"] for instance in instances)])
    latency = ("/s", "p50", "p95") if width >= WIDE else ()
    table = _table("", "Instance", "", "", *latency, "failed", "rej.", right=range(4, 9))
    causes = width >= WITH_CAUSES
    table.columns[1].max_width = max(20, width - 60 - CAUSE * causes)
    for instance in instances:
        if id(instance) not in shown:
            continue
        glyph, color, word = STATES.get(instance["state"], ("?", "", instance["state"]))
        if causes and (cause := instance["cause"]):
            word = f"{word}: {cause}"
        table.add_row(
            Text(instance["name"], "bold"),
            Text(strip_control(instance["url"].partition("://")[2])),
            Text(f"{glyph} {strip_control(word)}", color),
            Text(f"{instance['requests']:>3} {bar(instance['requests'] / most, BAR):<{BAR}}"),
            *(_latency(instance) if latency else ()),
            *_endings(instance),
        )
    yield table
    if hidden:
        yield Text(f"and {len(instances) - len(shown)} more", "dim")


def _latency(row: InstanceShown | StageShown) -> Iterable[Text]:
    yield Text(rate_text(row["rate"]))
    yield Text(seconds_text(row["p50_s"]))
    yield Text(seconds_text(row["p95_s"]))


def _endings(row: InstanceShown | StageShown) -> Iterable[Text]:
    yield Text(str(row["failed"] or ""), "red")
    yield Text(str(row["rejected"] or ""), "yellow")


def _stages(stages: Sequence[StageShown], room: int) -> Iterable[RenderableType]:
    if not stages:
        return
    table = _table("Stage", "/s", "p50", "p95", "p99", "failed", "rej.", right=range(1, 7))
    for stage in stages[: room - 1]:
        table.add_row(
            Text(stage["stage"], COLORS[stage["stage"]]),
            *_latency(stage),
            Text(seconds_text(stage["p99_s"])),
            *_endings(stage),
        )
    yield table


def _notices(notices: Sequence[Notice], room: int) -> Iterable[Text]:
    if room and notices:
        yield Text("Errors and changes", "dim")
    for notice in notices[: max(0, room - 1)]:
        message, color = notice["message"], OUTCOMES[notice["outcome"]]
        if notice["kind"] == "instance":
            _, color, message = STATES.get(message, ("", "", message))
        about = f"{notice['more']} {notice['cause'] or ''}".rstrip()
        message, what, more = map(strip_control, (message, notice["what"], about))
        at = (clock(notice["at_s"]), "dim")
        line = Text.assemble(at, " ", (message, color), f" {what} {more}", overflow="ellipsis")
        line.no_wrap = True
        yield line


def _requests(requests: Sequence[RecentRequest], room: int, width: int) -> Iterable[RenderableType]:
    shown = requests[: max(0, room - 1)]
    if not shown:
        return
    longest_s = max(0.001, *(span["seconds"] for span in shown))
    cells = max(MIN_BARS, width - 48)
    table = _table(
        "Ended", "Request", "Result", "Total", f"0 to {seconds_text(longest_s)}", right=[3]
    )
    table.columns[1].max_width = 12
    table.columns[2].max_width = 12
    for span in shown:
        result = f"{span['status']} {span['error'] or ''}".rstrip()
        table.add_row(
            Text(clock(span["ended_s"]), "dim"),
            Text(strip_control(span["id"])),
            Text(strip_control(result), OUTCOMES[span["outcome"]]),
            Text(seconds_text(span["seconds"])),
            _bars(span, longest_s, cells),
        )
    yield table


def _bars(request: RecentRequest, longest_s: float, cells: int) -> Text:
    """Return a timeline of cells, each in the colour of the stage that ran at its time."""
    line = Text(no_wrap=True)
    for cell in range(max(1, round(request["seconds"] / longest_s * cells))):
        at_s = (cell + 0.5) * longest_s / cells
        running = [
            span
            for span in request["spans"]
            if span["after_s"] <= at_s < span["after_s"] + span["seconds"]
        ]
        if running:
            color = OUTCOMES[running[-1]["outcome"]] or COLORS.get(running[-1]["stage"], "")
            line.append("█", color)
        else:
            line.append("─", "dim")
    return line


def _table(*titles: str, right: Iterable[int]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(
            title, justify="right" if index in right else "left", no_wrap=True, overflow="ellipsis"
        )
    return table
