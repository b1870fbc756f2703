"""Facts about instances, the store and its mount; findings, and their output as text and JSON.

Facts are observations without a verdict. `judge` turns them into findings. No I/O.
"""

import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath
from typing import NamedTuple

import orjson

from epd.routing.instances import Instance


@dataclass(frozen=True, slots=True)
class Mount:
    """Mounted file system, of a kind such as `nfs4`."""

    path: PurePosixPath
    kind: str


def mount_of(path: PurePath, table: Iterable[tuple[str, str, str, str]]) -> Mount | None:
    """Return the mount of an absolute path without symbolic links; None: the table has none.

    The table has device, mount point, type and options of each mount. Of several mounts at one
    mount point the last one counts.
    """
    mounts = [Mount(PurePosixPath(place), kind) for _, place, kind, _ in table]
    around = [mount for mount in mounts if path.is_relative_to(mount.path)]
    return max(reversed(around), key=lambda mount: len(mount.path.parts), default=None)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Model as `GET /v1/models` lists it; None: the instance does not report the value.

    Attributes:
        parent: model that a LoRA adapter belongs to; None for a model.
    """

    name: str
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a request that the doctor sent.

    Attributes:
        problem: description of the failure; None: the request succeeded.
        status: HTTP status of an error response.
        keeps: whether decode keeps its blocks for the next turn of a conversation.
    """

    problem: str | None = None
    status: int | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Preparation:
    """How an instance prepares media, from the metrics of its connector.

    Attributes:
        api_servers: number of its API servers, each with one thread for the processor.
        processor, device: kinds of device of the processor and of the model, such as `cpu`.
        media_io: modalities with `--media-io-kwargs`, which vLLM's keys then depend on.
    """

    api_servers: int
    processor: str
    device: str
    media_io: tuple[str, ...]


_PREPARATION = re.compile(rb"(?m)^vllm:ec_store_preparation_info\{([^}\n]{,1024})\} 1(?:\.0)?$")
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')


def read_preparation(page: bytes) -> Preparation | None:
    """Return how an instance prepares media; None: its page does not say."""
    sample = _PREPARATION.search(page)
    labels = {} if sample is None else dict(_LABEL.findall(sample[1].decode(errors="replace")))
    api_servers = labels.get("api_servers", "")
    if not api_servers.isdecimal():
        return None
    media_io = tuple(filter(None, labels.get("media_io", "").split(",")))
    return Preparation(
        int(api_servers), labels.get("processor", "cpu"), labels.get("device", "cpu"), media_io
    )


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """Facts about an instance, seen from outside.

    Attributes:
        problem: why it cannot be used; None: it answers `GET /health` with 2xx.
        answered: status of an answer by which it cannot be used.
        refuses: whether its host refuses connections to its port.
        skew_s: how far its clock is ahead of this machine's, by its `Date` header.
        keeps_alive: whether it keeps an idle connection for as long as the proxy pools one; None:
            not known.
        trials: results of the trial requests, by stage.
        namespaces: namespaces in which its EC connectors keep the model's entries, from its
            metrics and, for an encode instance, from its reply. A sound instance has one.
        preparation: how it prepares media; None: not known.
    """

    instance: Instance
    problem: str | None = None
    answered: int | None = None
    refuses: bool = False
    version: str | None = None
    models: tuple[ModelFacts, ...] = ()
    skew_s: float | None = None
    keeps_alive: bool | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)
    namespaces: frozenset[str] = frozenset()
    preparation: Preparation | None = None


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about the store, as the proxy uses it.

    Attributes:
        problem: why it cannot be used; None: it can be used.
        missing: whether the problem is that the store does not exist.
        round_trip_s: median time of a lookup.
        writable: whether the proxy can write names and claims.
        entry: state of the output that an encode instance just wrote: `read`, `found` (present,
            but not readable) or `missing`; None: no output to look up.
        elsewhere: namespace that has the missing output, if it is another than the encode
            instance reports.
        max_bytes: quota in bytes.
        writing_bytes: memory of a server for the entries that are being written to it; None for a
            directory.
        free_bytes, mount: free bytes and mount of the file system; None for Redis.
    """

    problem: str | None = None
    missing: bool = False
    round_trip_s: float = 0.0
    writable: bool = True
    entry: str | None = None
    elsewhere: str | None = None
    bytes: int | None = None
    max_bytes: int | None = None
    writing_bytes: int | None = None
    free_bytes: int | None = None
    mount: Mount | None = None


class Verdict(enum.StrEnum):
    """Severity of a finding, in rising order."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


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


def ok(subject: str, seen: str) -> Finding:
    """Return a finding without a defect."""
    return Finding(Verdict.OK, subject, seen)


def warn(subject: str, seen: str, advice: str) -> Finding:
    """Return a finding about a component that works, but not as well as it could."""
    return Finding(Verdict.WARN, subject, seen, advice)


def fail(subject: str, seen: str, advice: str) -> Finding:
    """Return a finding about a defect that affects requests."""
    return Finding(Verdict.FAIL, subject, seen, advice)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the failures first, and otherwise in their order."""
    order = list(Verdict)
    return sorted(findings, key=lambda finding: -order.index(finding.verdict))


def worst_verdict(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of the findings; `ok` if there are none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


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
