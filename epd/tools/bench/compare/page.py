"""Report of a comparison as one HTML page with plots, without scripts or files from elsewhere."""

import html
from collections.abc import Iterator

from epd.tools.bench.compare.hit_rates import crossover, rate_points
from epd.tools.bench.compare.plots import bars, color, scatter
from epd.tools.bench.compare.report import Results
from epd.tools.bench.compare.verdict import Measured

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2126;--soft:#5b6570;--grid:#dfe3e8;
--s0:#6f7882;--s1:#0f62c4;--s2:#c2570c;--s3:#0b7a66;--s4:#8a3fa0}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#9aa4ae;--grid:#30363c;
--s0:#a3adb7;--s1:#63a6f5;--s2:#f0924a;--s3:#3fc0a6;--s4:#c98be0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .3rem}
p{color:var(--soft);margin:.2rem 0 .8rem;max-width:48rem}
.cut{color:var(--ink);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(21rem,100%),1fr));gap:1.2rem}
figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:.95rem}
svg{overflow:visible;width:100%;height:auto;max-width:30rem;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}
.keys{margin-bottom:.8rem;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.95rem}
.keys i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td{border-bottom:1px solid var(--grid);padding:.3rem .8rem .3rem 0;vertical-align:top}
td+td{overflow-wrap:anywhere}code{font-size:.9em}
"""


def page(results: Results) -> str:
    """Return the page of these results, with all plots that have figures."""
    measured = results.measured()
    lines = (
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>Comparison with plain vLLM</title><style>{STYLE}</style>",
        *_head(results),
        *_ttft(measured),
        *_throughput(measured),
        *_conditions(results),
        "</html>",
    )
    return "\n".join(lines) + "\n"


def _head(results: Results) -> Iterator[str]:
    yield "<h1>Comparison with plain vLLM</h1>"
    if results.end:
        cut = html.escape(results.end)
        yield f'<p class="cut">Cut off: {cut}. What was measured before is below.</p>'
    failed = {name: arm.error.splitlines()[-1] for name, arm in results.arms.items() if arm.error}
    lines = [*results.verdict, *(f"`{name}`: {error}" for name, error in failed.items())]
    yield f"<ul>{''.join(f'<li>{_prose(line)}</li>' for line in lines)}</ul>"


def _keys(measured: Measured) -> str:
    keys = (
        f'<span><i style="background:{color(at)}"></i>{html.escape(name)}</span>'
        for at, name in enumerate(measured)
    )
    return f'<div class="keys">{"".join(keys)}</div>'


def _ttft(measured: Measured) -> Iterator[str]:
    yield "<h2>Time to the first token, by arm and percentile</h2>"
    yield "<p>Bar: median. Line: up to the 99th percentile, of several at once. Less is better.</p>"
    yield '<div class="plots">'
    for workload in dict.fromkeys(name for arm in measured.values() for name in arm):
        of_arms = {name: arm[workload] for name, arm in measured.items() if workload in arm}
        at_once = next(iter(of_arms.values())).at_once
        if at_once > 1:
            rows = {name: (each.ttft_p50_ms, each.ttft_p99_ms) for name, each in of_arms.items()}
            yield bars(f"{workload}, {at_once} at once", rows, [*measured])
            continue
        for kind in dict.fromkeys(kind for each in of_arms.values() for kind in each.ttft_ms):
            timed = {name: each.ttft_ms for name, each in of_arms.items() if kind in each.ttft_ms}
            rows = {name: (medians[kind], medians[kind]) for name, medians in timed.items()}
            yield bars(f"one at a time: {kind}", rows, [*measured])
    yield "</div>"


def _throughput(measured: Measured) -> Iterator[str]:
    points = rate_points(measured)
    yield "<h2>Throughput by hit rate</h2>"
    if not points:
        yield "<p>No arm has requests/s with media to compare with those of plain vLLM.</p>"
        return
    sentences = " ".join(_prose(crossover(arm, of_arm)) for arm, of_arm in points.items())
    yield (
        "<p>A point is a workload with media. A curve follows the line of least squares through "
        f"the times of a request; it crosses 1 where the arm breaks even. {sentences}</p>"
    )
    plot = scatter("requests/s over those of plain vLLM", points, [*measured])
    yield f'{_keys(measured)}<div class="plots">{plot}</div>'


def _conditions(results: Results) -> Iterator[str]:
    yield '<h2>Conditions</h2><div class="wide"><table>'
    for name, value in results.conditions():
        yield f"<tr><td>{_prose(name)}<td>{_prose(value)}"
    yield "</table></div><p>All figures and answers are in report.md and results.json.</p>"


def _prose(text: str) -> str:
    """Return text with the names between backticks as code."""
    words = html.escape(text).split("`")
    return "".join(f"<code>{word}</code>" if at % 2 else word for at, word in enumerate(words))
