"""A client's request while the server has it."""

from dataclasses import dataclass, field

from aiohttp import web

from epd.edge.access import Access
from epd.edge.admission import AdmittedRequest
from epd.request.context import RequestContext


@dataclass(slots=True)
class Visit:
    """What the server knows of a request.

    Attributes:
        app: the application that serves it.
        context: what it carries through the stages.
        access: whom its route answers.
        api: whether it is a request that a client's limits are for.
        admitted: what it has of this process; set when it is let in.
        stream: its answer, where that is a stream.
        answered: its status, set once the client has all of its answer and may leave.
    """

    app: web.Application
    context: RequestContext
    access: Access
    api: bool
    admitted: AdmittedRequest = field(init=False)
    stream: web.StreamResponse | None = None
    answered: int | None = None


VISIT = web.RequestKey("visit", Visit)
