"""Write the table of metrics in docs/metrics.md from epd/observe/metric_defs.py.

    python scripts/metrics_reference.py          writes the table
    python scripts/metrics_reference.py --check  fails if the table is out of date

The table is between `<!-- figures -->` and `<!-- end -->`. Every metric that the rest of the
document names must exist.
"""

import re
from collections.abc import Iterator

from epd.observe.metric_defs import METRIC_DEFS, MetricDef
from scripts.generated import DOCS, write_or_check

NAME = re.compile(r"\bepd_[a-z_]+")
OF_WORKERS = {"max": "the maximum", "min": "the minimum"}
ENDS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def table(*_: str) -> str:
    head = "| name | kind | labels | |\n| --- | --- | --- | --- |\n"
    return head + "".join(map(row, METRIC_DEFS.values()))


def row(figure: MetricDef) -> str:
    """Return the row of a metric, with the name of its samples (a histogram: of its family)."""
    name = figure.name + (ENDS["counter"][0] if figure.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in figure.labels)
    of_workers = OF_WORKERS.get(figure.of_workers.__name__)
    meaning = figure.meaning + (f" With several workers: {of_workers}." if of_workers else "")
    return f"| `{name}` | {figure.kind} | {labels} | {meaning} |\n"


def unknown(document: str) -> Iterator[str]:
    """Yield a problem for each metric in a document that does not exist."""
    known = {figure.name + end for figure in METRIC_DEFS.values() for end in ENDS[figure.kind]}
    known |= {figure.name for figure in METRIC_DEFS.values() if figure.kind == "histogram"}
    yield from (f"{name} is not a metric" for name in sorted({*NAME.findall(document)} - known))


if __name__ == "__main__":
    write_or_check(__doc__, [DOCS / "metrics.md"], table, unknown)
