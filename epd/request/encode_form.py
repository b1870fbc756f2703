"""Form of encode requests that an instance accepts, learned from its refusals."""

import asyncio
from http import HTTPStatus

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


class EncodeForms:
    """Forms in which instances accept encode requests.

    An instance may not know a model: it may be an adapter, and an encode instance has no language
    model, and so loads none. Or its template may need a system message.
    """

    def __init__(self) -> None:
        self._refused_until_s: BoundedDict[tuple[str, str], float] = BoundedDict(MAX_REFUSALS)

    def first_form(self, instance: Instance, body: Body, *, system: bool) -> Body:
        """Return an encode request in the form that the instance probably accepts.

        `system` is whether the client's request has a system message.
        """
        if system and self._has_refused(instance, SYSTEM_MESSAGE):
            body = with_system_message(body)
        return _without(body, "model") if self._has_refused(instance, _model(body)) else body

    def next_form(
        self, instance: Instance, body: Body, status: int, *, system: bool
    ) -> Body | None:
        """Return a refused encode request in another form; None if there is none."""
        field = OPTIONAL.get(status)
        if field is not None and body.get(field):
            if field == "model":
                self._learn_refusal(instance, _model(body))
            return _without(body, field)
        may_lack_system = system and status == HTTPStatus.BAD_REQUEST
        if may_lack_system and not has_system_message(body):
            return with_system_message(body)
        return None

    def record_success(self, instance: Instance, body: Body) -> None:
        """Remember the form of an accepted request."""
        if has_system_message(body):
            self._learn_refusal(instance, SYSTEM_MESSAGE)

    def _has_refused(self, instance: Instance, model: str) -> bool:
        """Return whether an instance has refused this model, or a missing `SYSTEM_MESSAGE`."""
        now_s = asyncio.get_running_loop().time()
        return now_s < self._refused_until_s.get((instance.url, model), 0.0)

    def _learn_refusal(self, instance: Instance, model: str) -> None:
        until_s = asyncio.get_running_loop().time() + LEARNED_S
        self._refused_until_s[instance.url, model] = until_s


def _model(body: Body) -> str:
    return str(body.get("model"))[:MAX_LENGTH]


def _without(body: Body, field: str) -> Body:
    return {name: value for name, value in body.items() if name != field}
