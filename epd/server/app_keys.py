"""Typed keys of the objects in the application, and the server's state of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from epd.aio import Background
from epd.api.endpoint import Endpoint
from epd.config import ProxyConfig
from epd.edge.access import Access
from epd.edge.admission import Admission, AdmittedRequest
from epd.events import Observer
from epd.request.model_names import ModelNames
from epd.request.recorder import Recorder
from epd.routing.table import InstanceTable
from epd.tenants import ANONYMOUS, ApiKeys, Tenant

if TYPE_CHECKING:
    from epd.spans import Tracer


@dataclass(slots=True, eq=False)
class Visit:
    """State of one request in the server, from its head on.

    Attributes:
        app: application that serves the request.
        access: class of access of its route.
        api: whether the tenant's limits apply to the request.
        id: id that the instances see.
        endpoint: the requested endpoint.
        headers: headers for the instances, without the request id.
        clients_key: whether the instances receive the client's own key, and not the proxy's.
        record: record of its progress.
        tenant: owner of the request; set once its key is checked.
        admitted: slot and bytes of the request in this process; set at its admission.
        stream: response, if it is a stream.
        answered: status; set once the client has the whole response, so that a later disconnect
            is no error.
    """

    app: web.Application
    config: ProxyConfig
    access: Access
    api: bool
    id: str
    endpoint: Endpoint
    headers: Mapping[str, str]
    clients_key: bool
    record: Recorder
    tenant: Tenant = ANONYMOUS
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
