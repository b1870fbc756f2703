"""Findings of `epd doctor`, and their output as text and JSON. No I/O."""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson


class Verdict(enum.StrEnum):
    """Severity of a finding, in rising order."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Verdict
SEVERITY = {verdict: number for number, verdict in enumerate(Verdict)}


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        verdict: severity. `fail`: requests will fail or be slow because of it.
        advice: what to change; empty: nothing.
    """

    verdict: Verdict
    subject: str
    seen: str
    advice: str = ""


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the failures first, and otherwise in their order."""
    return sorted(findings, key=lambda finding: -SEVERITY[finding.verdict])


def worst_verdict(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of the findings; `ok` if there are none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.__getitem__, default=OK)


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding, its advice on the next line, and a line of totals."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<4}  {finding.subject:<{width}}  {finding.seen}")
        if finding.advice:
            lines.append(f"{'':4}  {'':{width}}  -> {finding.advice}")
    counts = Counter(finding.verdict for finding in findings)
    lines += ["", ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """Return a JSON object with the worst verdict and all findings."""
    document = {
        "verdict": worst_verdict(findings),
        "findings": [finding._asdict() for finding in findings],
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
