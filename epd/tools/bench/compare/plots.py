"""Plots of a comparison as SVG, in the colours of the page's variables `--s0` to `--s4`."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from epd.tools.bench.compare.hit_rates import RatePoint, TimeLine, time_line

Point = tuple[float, float]

WIDTH = 340
"""Width of every plot in units of its view box: a pixel on a narrow screen."""
ROW, LEFT, RIGHT = 26, 62, 106
"""Height of a row of bars, and the margins for its name and its value."""
TALL, ABOVE, BELOW, BESIDE = 250, 12, 34, 34
"""Height and margins of the plot of throughput."""
CURVE = 20
"""Pieces of a curve."""


def color(arm: int) -> str:
    """Return the colour of an arm, by its place among all arms."""
    return f"var(--s{arm % 5})"


def bars(title: str, rows: Mapping[str, Point], arms: Sequence[str]) -> str:
    """Return a row for each arm: a bar of its first milliseconds, and a line up to the second."""
    steps = _steps(max(high for _, high in rows.values()))
    room, height = WIDTH - LEFT - RIGHT, ROW * len(rows) + 22
    parts = []
    for step in steps:
        x = LEFT + room * step / steps[-1]
        parts.append(_line((x, 4), (x, height - 18), "var(--grid)"))
        parts.append(_label((x, height - 4), f"{step:g}", "middle", "soft"))
    for at, (name, (low, high)) in enumerate(rows.items()):
        middle, hue = ROW * at + 16, color(arms.index(name))
        ends = [LEFT + room * value / steps[-1] for value in (low, high)]
        value = f"{low:.0f} ms" if low == high else f"{low:.0f} to {high:.0f} ms"
        parts += [
            f"<g><title>{html.escape(name)}: {value}</title>",
            _label((LEFT - 6, middle + 4), name, "end"),
            _bar(ends[0] - LEFT, middle, hue),
            _line((ends[0], middle), (ends[1], middle), hue, 2),
            _line((ends[1], middle - 5), (ends[1], middle + 5), hue, 2) if low != high else "",
            _label((ends[1] + 6, middle + 4), value, "start"),
            "</g>",
        ]
    return _figure(title, height, parts)


def scatter(title: str, points: Mapping[str, Sequence[RatePoint]], arms: Sequence[str]) -> str:
    """Return the gains of the arms over the hit rate, with a curve and its break-even point."""
    steps = _steps(max(1.2, *(point.gain for of_arm in points.values() for point in of_arm)))
    room, high = WIDTH - BESIDE - 20, TALL - BELOW - ABOVE

    def place(hit_rate: float, gain: float) -> Point:
        return BESIDE + room * hit_rate, ABOVE + high * (1 - min(gain, steps[-1]) / steps[-1])

    parts = []
    for step in steps:
        parts.append(_line(place(0, step), place(1, step), "var(--grid)"))
        parts.append(_label((BESIDE - 6, place(0, step)[1] + 4), f"{step:g}", "end", "soft"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, _ = place(share, 0)
        parts += [_label((x, TALL - 18), f"{share:.0%}", "middle", "soft")]
    end, even = place(1, 1)
    parts += [
        _label((BESIDE + room / 2, TALL - 3), "hit rate", "middle", "soft"),
        _line(place(0, 1), place(1, 1), color(0), 2),
        _label((end, even - 5), "plain vLLM", "end", "soft"),
    ]
    for arm, of_arm in points.items():
        hue, line = color(arms.index(arm)), time_line(of_arm)
        first, last = of_arm[0].hit_rate, of_arm[-1].hit_rate
        if line is not None:
            places = [place(share, line.gain_at(share)) for share in _shares(first, last)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="2"/>')
            parts.append(_break_even(line, place, hue))
        for point in of_arm:
            x, y = place(point.hit_rate, point.gain)
            text = f"{arm}, {point.workload}: {point.gain:.2f}x at {point.hit_rate:.0%}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{hue}" stroke="var(--paper)" '
                f'stroke-width="2"><title>{html.escape(text)}</title></circle>'
            )
    return _figure(title, TALL, parts)


def _shares(first: float, last: float) -> Iterable[float]:
    return (first + (last - first) * step / CURVE for step in range(CURVE + 1))


def _break_even(line: TimeLine, place: Callable[[float, float], Point], hue: str) -> str:
    """Return a vertical line from the point where an arm breaks even down to its hit rate."""
    if line.break_even is None:
        return ""
    return _line(place(line.break_even, 1), place(line.break_even, 0), hue, dashes="4 3")


def _figure(title: str, height: float, parts: Iterable[str]) -> str:
    name = html.escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def _line(start: Point, end: Point, hue: str, width: float = 1, *, dashes: str = "none") -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{hue}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def _bar(length: float, middle: float, hue: str) -> str:
    size = f'width="{max(1, length):.1f}" height="12" rx="2"'
    return f'<rect x="{LEFT}" y="{middle - 6}" {size} fill="{hue}"/>'


def _label(place: Point, text: str, anchor: str, kind: str = "") -> str:
    x, y = place
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
        f"{html.escape(text)}</text>"
    )


def _steps(most: float) -> Sequence[float]:
    """Return round numbers from 0 to one that is `most` or more, in up to five equal steps."""
    most = max(1.0, most)
    power = 10 ** math.floor(math.log10(most))
    step = next(each * power for each in (0.2, 0.5, 1, 2) if 5 * each * power >= most)
    return [step * number for number in range(math.ceil(most / step) + 1)]
