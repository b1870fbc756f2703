"""Facts about the machine, instances, the store and KV transfers: observations without a verdict.

`epd.tools.doctor.checks` judges them. No I/O.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from epd.config import ProxyConfig
from epd.routing.instances import Instance

ENCODE, CONSUME, PREFILL, DECODE = "encode", "metadata", "prefill", "decode"
READ, FORGET = "conversation", "no conversation"
EVENTS = "KV events"
RAW = "media"
"""Names of the trial requests."""

FULL_BYTES = 16 * 2**20


class HostFacts(NamedTuple):
    """Configuration of the proxy, and the limits of its machine.

    Attributes:
        descriptors: hard limit of open files of a process.
        needed_descriptors: those of a worker with its share of `max_requests`.
        somaxconn: `net.core.somaxconn` of Linux; None: not known.
        has_forward_proxy: whether the environment names a forward proxy for http or https.
        media_readable: whether this process can read `allowed_local_media_path`.
    """

    config: ProxyConfig
    descriptors: int
    needed_descriptors: int
    somaxconn: int | None
    has_forward_proxy: bool
    media_readable: bool


class ModelFacts(NamedTuple):
    """Model as `GET /v1/models` lists it; None: the instance does not report the value.

    Attributes:
        parent: model that a LoRA adapter belongs to; None for a model.
    """

    name: str
    max_model_len: int | None = None
    parent: str | None = None


class Trial(NamedTuple):
    """Result of a request that the doctor sent.

    Attributes:
        problem: description of the failure; empty: the request succeeded.
        status: HTTP status of an error response.
    """

    problem: str = ""
    status: int | None = None


class Preparation(NamedTuple):
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


@dataclass(slots=True)
class InstanceFacts:
    """Facts about an instance, seen from outside.

    Attributes:
        problem: why it cannot be used; None: it answers `GET /health` with 2xx.
        status: status of a response by which it cannot be used.
        refuses: whether its host refuses connections to its port.
        skew_s: how far its clock is ahead of this machine's, by its `Date` header.
        namespaces: namespaces in which its EC connectors keep the model's entries, from its
            metrics and, for an encode instance, from its reply. A sound instance has one.
        preparation: how it prepares media; None: not known.
        trials: results of the trial requests, by stage.
    """

    instance: Instance
    problem: str | None = None
    status: int | None = None
    refuses: bool = False
    version: str | None = None
    models: Sequence[ModelFacts] = ()
    skew_s: float | None = None
    namespaces: frozenset[str] = frozenset()
    preparation: Preparation | None = None
    trials: dict[str, Trial] = field(default_factory=dict)

    @property
    def model_names(self) -> set[str]:
        return {model.name for model in self.models}

    @property
    def name(self) -> str:
        """Role and URL, as findings show them."""
        return f"{self.instance.role} {self.instance.url}"

    def max_model_len(self, model: str) -> int:
        """Return the longest request for a model in tokens; 0 if it is not reported."""
        lengths = (found.max_model_len or 0 for found in self.models if found.name == model)
        return max(lengths, default=0)

    def add_trial(self, stage: str, trial: Trial) -> None:
        """Record the result of a request; the first failure of a stage stays."""
        if stage not in self.trials or not self.trials[stage].problem:
            self.trials[stage] = trial


class Mount(NamedTuple):
    """Mounted file system, of a kind such as `nfs4`."""

    path: PurePosixPath
    kind: str


class StoreFacts(NamedTuple):
    """Facts about the store, as the proxy uses it.

    Attributes:
        budget_s: time that the proxy allows a lookup.
        is_configured: whether the proxy has a store.
        problem: why it cannot be used; None: it can be used.
        is_missing: whether the problem is that the store does not exist.
        round_trip_s: median time of a lookup.
        is_writable: whether the proxy can write names and claims.
        entry: state of the output that an instance just wrote: `read`, `found` (present,
            but not readable) or `missing`; None: no output to look up.
        max_bytes: quota in bytes.
        writing_bytes: memory of a server for the entries that are being written to it; None for a
            directory.
        full_bytes: free bytes below which a missing entry is explained by the lack of room.
        free_bytes, mount: free bytes and mount of the file system; None for Redis.
    """

    budget_s: float
    is_configured: bool = True
    problem: str | None = None
    is_missing: bool = False
    round_trip_s: float = 0.0
    is_writable: bool = True
    entry: str | None = None
    bytes: int | None = None
    max_bytes: int | None = None
    writing_bytes: int | None = None
    free_bytes: int | None = None
    full_bytes: int = FULL_BYTES
    mount: Mount | None = None

    @property
    def room_bytes(self) -> float:
        """Bytes of the file system for the store; infinite for Redis."""
        return math.inf if self.free_bytes is None else self.free_bytes + (self.bytes or 0)

    @property
    def is_full(self) -> bool:
        """Whether it lacks a new entry because its file system has no room."""
        has_room = self.free_bytes is None or self.free_bytes >= self.full_bytes
        return self.entry == "missing" and not has_room
