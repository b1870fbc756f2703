"""Command `epd bench plot`: charts of results of the other benchmarks, light and dark."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from epd.parser import Commands, Parser
from epd.tools.bench.scenarios import DIRECT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

BAR_HEIGHT = 0.8
ROW_INCHES = 0.26
WIDTH_INCHES = 8.0


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for light or dark pages; the name is the suffix of the chart's file.

    The colours of the contenders can be distinguished without red and green (Okabe and Ito,
    https://jfly.uni-koeln.de/color/).
    """

    name: str
    text: str
    bars: tuple[str, ...]


THEMES = (
    Theme("light", "#1f2328", ("#0072b2", "#999999", "#e69f00", "#56b4e9", "#cc79a7", "#009e73")),
    Theme("dark", "#e6edf3", ("#56b4e9", "#8b949e", "#e69f00", "#0072b2", "#cc79a7", "#009e73")),
)


@dataclass(frozen=True, slots=True)
class Bars:
    """Chart of horizontal bars; `series` has value and label of each contender in each row."""

    title: str
    rows: Sequence[str]
    series: Mapping[str, Sequence[tuple[float, str]]]


def add_parser(benchmarks: Commands) -> None:
    """Add `plot` to the benchmarks."""
    parser = benchmarks.add_parser(
        "plot",
        help="draw results",
        description="Draw results of `epd bench overhead` and `epd bench serve`, as SVG files for "
        "light pages and for dark ones.",
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="FILE", help="result files of --out"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="folder for the charts (default: the current one)",
    )
    parser.set_defaults(run=lambda **flags: _run(parser, **flags))


def _run(parser: Parser, *, results: Sequence[Path], folder: Path) -> None:
    for path in results:
        try:
            document = orjson.loads(path.read_bytes())
            pictures = PICTURES[document["kind"]](document)
        except (AttributeError, OSError, LookupError, TypeError, ValueError) as error:
            parser.error(f"{path} has no results: {type(error).__name__}: {error}")
        for name, bars in pictures.items():
            for theme in THEMES:
                picture = folder / f"{name}-{theme.name}.svg"
                try:
                    draw(bars, theme, picture)
                except ImportError:
                    sys.exit("epd bench plot: needs matplotlib: pip install '.[bench]'")
                except OSError as error:
                    sys.exit(f"epd bench plot: {error}")
                print(picture)


def overhead_pictures(document: Document) -> dict[str, Bars]:
    """Return the charts of the proxies' cost, each as a share of the most expensive one."""
    pictures = {}
    for name, title, field, unit, fresh in (
        ("overhead", "CPU time of the proxy for a request", "cpu_ms", "{:.2f} ms", False),
        ("overhead-memory", "Peak memory of the proxy", "resident_bytes", "{:,.0f} bytes", True),
    ):
        results = [result for result in document["results"] if result["scenario"]["fresh"] is fresh]
        if results:
            pictures[name] = Bars(
                title,
                [result["scenario"]["title"] for result in results],
                _shares([_values(result, field) for result in results], unit),
            )
    return pictures


def _values(result: Mapping[str, Any], field: str) -> dict[str, float]:
    return {name: row[field] for name, row in result["contenders"].items() if name != DIRECT}


def _shares(
    rows: Sequence[Mapping[str, float]], unit: str
) -> Mapping[str, Sequence[tuple[float, str]]]:
    """Return each value as a share of the largest in its row, with its label."""
    most = [max(row.values()) or 1.0 for row in rows]
    return {
        name: [
            (row[name] / top, unit.format(row[name])) for row, top in zip(rows, most, strict=True)
        ]
        for name in rows[0]
    }


def serve_pictures(document: Document) -> dict[str, Bars]:
    """Return the charts of a fleet: time to the first token, and measured and ideal hit rate."""
    runs = document["runs"]
    most = max(run["ttft_ms"]["p99"] for run in runs) or 1.0
    first = {
        percentile: [
            (run["ttft_ms"][percentile] / most, f"{run['ttft_ms'][percentile]:.0f} ms")
            for run in runs
        ]
        for percentile in ("p50", "p99")
    }
    rows = [f"{run['name']}, {run['dataset']}" for run in runs]
    pictures = {"serve-ttft": Bars("Time to the first token", rows, first)}
    cached = [run for run in runs if run["hit_rate"] is not None]
    if cached:
        hits = {
            title: [(run[field], f"{run[field]:.1%}") for run in cached]
            for title, field in (("measured", "hit_rate"), ("ideal", "ideal_hit_rate"))
        }
        rows = [f"{run['name']}, {run['dataset']}" for run in cached]
        pictures["serve-hits"] = Bars("Hit rate of the encoder store", rows, hits)
    return pictures


PICTURES: Mapping[str, Callable[[Document], dict[str, Bars]]] = {
    "overhead": overhead_pictures,
    "serve": serve_pictures,
}
"""Function that makes the charts, by the kind of results."""


def draw(bars: Bars, theme: Theme, path: Path) -> None:
    """Write a chart as SVG, the same bytes for the same bars; `ImportError`: no matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - an optional dependency
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Text stays text in the SVG, for screen readers and search.
    with mpl.rc_context({"svg.hashsalt": "epd", "svg.fonttype": "none", "font.size": 9}):
        height = 0.9 + ROW_INCHES * len(bars.rows) * (len(bars.series) + 0.6)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.add_subplot()
        _draw_bars(axes, bars, theme)
        _label(axes, bars, theme)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _draw_bars(axes: "Axes", bars: Bars, theme: Theme) -> None:
    height = BAR_HEIGHT / len(bars.series)
    for number, (name, values) in enumerate(bars.series.items()):
        middle = (number - (len(bars.series) - 1) / 2) * height
        drawn = axes.barh(
            [row + middle for row in range(len(bars.rows))],
            [value for value, _ in values],
            height,
            label=name,
            color=theme.bars[number % len(theme.bars)],
        )
        labels = [label for _, label in values]
        axes.bar_label(drawn, labels, padding=3, fontsize=8, color=theme.text)


def _label(axes: "Axes", bars: Bars, theme: Theme) -> None:
    """Add a title, the rows' names and a legend. There is no scale: each bar shows its value."""
    axes.set_title(bars.title, loc="left", color=theme.text)
    axes.set_yticks(range(len(bars.rows)), bars.rows, color=theme.text)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.legend(
        frameon=False,
        labelcolor=theme.text,
        ncols=len(bars.series),
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
