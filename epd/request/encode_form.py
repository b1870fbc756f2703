"""Form of encode requests that an instance accepts, learned from its refusals."""

import asyncio
from http import HTTPStatus
from typing import NamedTuple

from ec_store.bounded import BoundedDict
from epd.api.chat import OPTIONAL, has_system_message, with_system_message
from epd.api.items import Body
from epd.request.model_names import MAX_LENGTH
from epd.routing.instances import Instance

LEARNED_S = 60.0
"""Time in seconds for which a refusal is remembered."""

MAX_REFUSALS = 1024
"""Upper bound of the remembered refusals."""

SYSTEM_MESSAGE = ""
"""Name that stands for a missing system message; no model has it."""


class Refusals:
    """Models that encode instances do not know, and instances that need a system message."""

    def __init__(self) -> None:
        self._until_s: BoundedDict[tuple[str, str], float] = BoundedDict(MAX_REFUSALS)

    def is_recent(self, instance: Instance, refused: str) -> bool:
        """Return whether an instance has refused this model, or a missing `SYSTEM_MESSAGE`."""
        now_s = asyncio.get_running_loop().time()
        return now_s < self._until_s.get((instance.url, refused), 0.0)

    def add(self, instance: Instance, refused: str) -> None:
        """Remember a refusal, as `is_recent` describes it."""
        until_s = asyncio.get_running_loop().time() + LEARNED_S
        self._until_s[instance.url, refused] = until_s


class EncodeForm(NamedTuple):
    """Form of the encode requests of one client's request at an instance.

    Attributes:
        refusals: refusals of earlier requests.
        instance: the instance.
        system: whether the client's request has a system message.
    """

    refusals: Refusals
    instance: Instance
    system: bool

    def first(self, request: Body) -> Body:
        """Return an encode request in the form that the instance probably accepts.

        The model may be an adapter. An encode instance has no language model, and so loads none.
        """
        if self.system and self.refusals.is_recent(self.instance, SYSTEM_MESSAGE):
            request = with_system_message(request)
        known = not self.refusals.is_recent(self.instance, _model(request))
        return request if known else _without(request, "model")

    def after(self, request: Body, status: int) -> Body | None:
        """Return a refused encode request in another form; None if there is none."""
        field = OPTIONAL.get(status)
        if field is not None and request.get(field):
            if field == "model":
                self.refusals.add(self.instance, _model(request))
            return _without(request, field)
        may_lack_system = self.system and status == HTTPStatus.BAD_REQUEST
        if may_lack_system and not has_system_message(request):
            return with_system_message(request)
        return None

    def record_success(self, request: Body) -> None:
        """Remember the form of an accepted request."""
        if has_system_message(request):
            self.refusals.add(self.instance, SYSTEM_MESSAGE)


def _model(request: Body) -> str:
    """Return the name of a request's model, of limited length."""
    return str(request.get("model"))[:MAX_LENGTH]


def _without(body: Body, field: str) -> Body:
    return {name: value for name, value in body.items() if name != field}
