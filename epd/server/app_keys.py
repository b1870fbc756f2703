"""Typed keys of the objects in the application, and the server's state of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from epd.aio import Background
from epd.config import ProxyConfig
from epd.edge.access import Access
from epd.edge.admission import Admission, AdmittedRequest
from epd.events import Observer
from epd.request.context import ModelNames, RequestContext
from epd.routing.table import InstanceTable
from epd.tenants import ApiKeys

if TYPE_CHECKING:
    from epd.spans import Tracer


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

CONFIG = web.AppKey("config", ProxyConfig)
KEYS = web.AppKey("keys", ApiKeys)
"""Set only if API keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Class of access of each handler."""
ADMISSION = web.AppKey("admission", Admission)
TABLE = web.AppKey("table", InstanceTable)
BACKGROUND = web.AppKey("background", Background)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
MODELS = web.AppKey("models", ModelNames)
TRACER: "web.AppKey[Tracer]" = web.AppKey("tracer")
"""Set only if requests are traced."""
UNKNOWN = "unknown"
"""Name of the route for all unknown paths."""
