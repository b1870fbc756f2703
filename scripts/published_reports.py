"""Write the tables of docs/reports from its JSON, by the code of `epd bench compare`.

python scripts/published_reports.py          writes the tables
python scripts/published_reports.py --check  fails if a table is out of date
"""

import json
import re
from dataclasses import fields
from datetime import date
from math import nan
from typing import Any

from epd.tools.bench.compare.figures import Figures
from epd.tools.bench.compare.report import ArmResult, Results
from epd.tools.bench.compare.verdict import verdict
from scripts.generated import DOCS, write_or_check

REPORTS = DOCS / "reports"


def section(name: str, _: str) -> str:
    """Return the report of a JSON file without its title, its headings one level down."""
    file = REPORTS / name.removeprefix("report ")
    report = read(file.read_text()).markdown().partition("\n")[2]
    return re.sub(r"^## ", "### ", report, flags=re.MULTILINE).lstrip("\n")


def read(text: str) -> Results:
    """Return results from JSON, with a verdict on their figures; null is a figure not measured."""
    content = json.loads(text)
    content.pop("kind")
    content["arms"] = {name: _arm(arm) for name, arm in content["arms"].items()}
    content["started_at"] = date.fromisoformat(content["started_at"])
    content["tolerance"] = _number(content["tolerance"])
    results = Results(**content)
    results.verdict = [*verdict(results.measured())]
    return results


def _arm(content: dict[str, Any]) -> ArmResult:
    workloads = content.pop("workloads")
    return ArmResult(**content, workloads={name: _figures(of) for name, of in workloads.items()})


def _figures(content: dict[str, Any]) -> Figures:
    return Figures(**{field.name: _number(content[field.name]) for field in fields(Figures)})


def _number(value: Any) -> Any:
    return nan if value is None else value


if __name__ == "__main__":
    write_or_check(__doc__, sorted(REPORTS.glob("*.md")), section)
