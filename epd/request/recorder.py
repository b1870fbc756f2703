"""Recorder of a request: its record while it is written, with its spans and observers."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from epd.api.chat import CHAT
from epd.api.items import MMItem
from epd.errors import ProxyError, Stage, slug_of
from epd.events import Observer, RequestRecord, StageDone
from epd.request.model_names import MAX_LENGTH, ModelNames

if TYPE_CHECKING:
    from epd.spans import RequestSpan, Span

WAIT = "encode wait"
"""Name of the span of an item that another request or another proxy encodes."""

WITHIN = frozenset[Stage]({"queue", "store"})
"""Stages that involve no instance."""


@dataclass(slots=True, eq=False)
class Recorder(RequestRecord):
    """Record of a request that emits its events, from the request's head to its end.

    Attributes:
        endpoint: path of the request's endpoint.
        observers: receivers of the events.
        models: the instances' names of models.
        span: span of the trace; None without tracing.
        model: the client's name of the model, once the body is read.
    """

    endpoint: str = CHAT.path
    observers: Sequence[Observer] = ()
    models: ModelNames = field(default_factory=ModelNames)
    span: "RequestSpan | None" = None
    model: str | None = None

    def begin_request(self, model: str | None, operation: str | None = None) -> None:
        """Record what the body says: the model, and the endpoint's operation for the span."""
        # `/ui` keeps records. A longer name belongs to no model, and has the same label.
        self.model = None if model is None else model[: MAX_LENGTH + 1]
        if self.span is not None:
            self.span.record_request(operation, self.model)

    def learn_model(self, answer: bytes) -> None:
        """Learn the instances' name of the model from a 2xx answer."""
        self.models.learn_name(self.model, answer)

    def time_stage(self, stage: Stage, where: str, item: MMItem | None = None) -> "StageTimer":
        """Return a context that emits a `StageDone` at its exit, with or without an error.

        Its span starts here if the request is traced.
        """
        return StageTimer(self, stage, where, item)

    def wait_span(self, item: MMItem) -> "AbstractContextManager[Span | None]":
        """Return the span of a wait for an item's encode; None as its value without tracing."""
        return nullcontext() if self.span is None else self.span.child(WAIT, item=item)

    def end_stage(self, event: StageDone) -> None:
        """Record the end of a stage, which may be after the end of the request, and emit it."""
        self.add_stage(event)
        for observer in self.observers:
            observer.stage_done(event)

    def end_request(
        self, status: int | None, error: str | None = None, reason: str | None = None
    ) -> None:
        """Make the record final, and emit it; for the arguments see `RequestRecord.end`."""
        self.end(time.monotonic(), status, error, reason, self.models.name_of(self.model))
        if self.span is not None:
            self.span.end_request(self)
        for observer in self.observers:
            observer.request_done(self)


class StageTimer:
    """Stage of a request in progress.

    Attributes:
        span: span of the stage; None without tracing.
    """

    __slots__ = ("_item", "_record", "_stage", "_started_s", "_where", "span")

    def __init__(self, record: Recorder, stage: Stage, where: str, item: MMItem | None) -> None:
        self._record = record
        self._stage: Stage = stage
        self._where = where
        self._item = item
        self.span: Span | None = None
        if record.span is not None:
            path = CHAT.path if stage == "encode" else record.endpoint
            url = None if stage in WITHIN else where + path
            self.span = record.span.child(stage, url=url, item=item)

    def record_status(self, status: int) -> None:
        """Record the HTTP status of the instance's answer in the span."""
        if self.span is not None:
            self.span.record_status(status)

    def __enter__(self) -> Self:
        self._record.wait_for(self._stage)
        self._started_s = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        slug, ended_s, record = slug_of(error), time.monotonic(), self._record
        if self.span is not None and (error is not None or self._stage != "decode"):
            self.span.end_span(slug)  # decode's span continues until its answer has been relayed
        record.end_stage(
            StageDone(
                self._stage,
                self._where,
                self._started_s,
                ended_s - self._started_s,
                slug,
                record.models.name_of(record.model),
                None if self._item is None else self._item.modality,
                rejected=isinstance(error, ProxyError) and error.rejects_request,
            )
        )
