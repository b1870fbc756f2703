"""State of a client's request in the server."""

from dataclasses import dataclass, field

from aiohttp import web

from epd.edge.access import Access
from epd.edge.admission import AdmittedRequest
from epd.request.context import RequestContext


@dataclass(slots=True)
class Visit:
    """State of one request in the server.

    Attributes:
        app: application that serves the request.
        context: context of the request in the stages.
        access: class of access of its route.
        api: whether the tenant's limits apply to the request.
        admitted: place and bytes of the request in this process; set at its admission.
        stream: response, if it is a stream.
        answered: status; set once the client has the whole response, so that a later disconnect
            is no error.
    """

    app: web.Application
    context: RequestContext
    access: Access
    api: bool
    admitted: AdmittedRequest = field(init=False)
    stream: web.StreamResponse | None = None
    answered: int | None = None


VISIT = web.RequestKey("visit", Visit)
