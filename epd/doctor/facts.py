"""What was seen of an instance and of the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.doctor.mounts import Mount
from epd.routing.instances import Instance


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
