"""What was seen of an instance and of the store.

The mount table of this machine.

What the doctor says.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

import orjson

from epd.routing.instances import Instance

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the mount table.

    Attributes:
        path: where the file system is mounted.
        kind: its type, as `nfs4`.
        options: as `{"vers": "4.2", "hard": ""}`.
    """

    path: PurePosixPath
    kind: str
    options: dict[str, str]


def mount_of(path: PurePosixPath, table: Iterable[str]) -> Mount | None:
    """Return the mount that a path is on; None where the table has none.

    Args:
        path: absolute, without links.
        table: lines of `/proc/mounts` (proc_pid_mounts(5), fstab(5)). Of mounts at one place the
            last one counts.
    """
    found: Mount | None = None
    for line in table:
        match line.split(" "):
            case [_, place, kind, options, *_]:
                mount = Mount(PurePosixPath(_unescaped(place)), kind, _options(options))
                nearer = found is None or len(mount.path.parts) >= len(found.path.parts)
                if path.is_relative_to(mount.path) and nearer:
                    found = mount
            case _:
                pass
    return found


def _options(text: str) -> dict[str, str]:
    pairs = (option.partition("=") for option in text.split(","))
    return {name: value for name, _, value in pairs}


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as `GET /v1/models` lists it.

    Attributes:
        name: what requests call it.
        root: where its weights are from, if the instance says so.
        max_model_len: tokens of a request and its answer, if the instance says so.
    """

    name: str
    root: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A request that was sent to see what comes back.

    Attributes:
        problem: what went wrong; None where nothing did.
        status: HTTP status of an answer that is an error.
        keeps: whether decode keeps its blocks for the next turn of a conversation.
    """

    problem: str | None = None
    status: int | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """An instance, looked at from outside.

    Attributes:
        instance: the one.
        problem: why it cannot be used; None where it answers `GET /health` with 2xx.
        version: vLLM's.
        models: what it serves.
        skew_s: its clock, by its `Date` header, ahead of ours.
        keeps_alive: whether it keeps an idle connection for as long as the proxy pools one.
        trials: what became of the requests that were tried, by their stage.
        namespaces: where its EC connectors keep the model's entries, by its metrics and, of an
            encode instance, by its reply. One instance has one.
    """

    instance: Instance
    problem: str | None = None
    version: str | None = None
    models: tuple[Model, ...] = ()
    skew_s: float | None = None
    keeps_alive: bool | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)
    namespaces: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The store, as the proxy uses it.

    Attributes:
        problem: why it cannot be used.
        missing: whether there is none, which is such a problem.
        round_trip_s: of a look-up, the median of some.
        writable: whether names and claims can be written.
        entry: of the output an encode instance has just made: `read`, `found` (there, but it
            cannot be read), `missing`; None where there was none to look for.
        elsewhere: the namespace that has the missing output, where it is another than the one
            that the encode instance reports.
        bytes: what it takes.
        max_bytes: its quota.
        free_bytes: what the file system has left; None for Redis.
        mount: the file system; None for Redis.
    """

    problem: str | None = None
    missing: bool = False
    round_trip_s: float = 0.0
    writable: bool = True
    entry: str | None = None
    elsewhere: str | None = None
    bytes: int | None = None
    max_bytes: int | None = None
    free_bytes: int | None = None
    mount: Mount | None = None


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
