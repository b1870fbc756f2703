"""What the doctor says."""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        verdict: how bad it is: `fail` is what requests will suffer from.
        subject: what was looked at.
        seen: what was seen.
        advice: what to change; empty where nothing has to be.
    """

    verdict: Verdict
    subject: str
    seen: str
    advice: str = ""


def ok(subject: str, seen: str) -> Finding:
    """As it should be."""
    return Finding(Verdict.OK, subject, seen)


def warn(subject: str, seen: str, advice: str) -> Finding:
    """Works, but not as well as it could."""
    return Finding(Verdict.WARN, subject, seen, advice)


def fail(subject: str, seen: str, advice: str) -> Finding:
    """Requests will suffer."""
    return Finding(Verdict.FAIL, subject, seen, advice)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst of them."""
    order = list(Verdict)
    return max((one.verdict for one in findings), key=order.index, default=Verdict.OK)


def as_text(findings: Sequence[Finding]) -> str:
    """Lines for people: what is wrong has what to change below it."""
    width = max((len(one.subject) for one in findings), default=0)
    lines = []
    for one in findings:
        lines.append(f"{one.verdict:<4}  {one.subject:<{width}}  {one.seen}")
        if one.advice:
            lines.append(f"{'':4}  {'':{width}}  -> {one.advice}")
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """One object: the worst verdict, and all findings."""
    document = {"verdict": worst(findings), "findings": [one._asdict() for one in findings]}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
