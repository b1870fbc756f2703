"""What the application and its requests hold, by typed keys."""

from collections.abc import Mapping, Sequence

from aiohttp import web

from epd.background import Background
from epd.config.live import LiveConfig
from epd.edge.access import Access
from epd.edge.admission import Admission, Held
from epd.events import Observer
from epd.models import ModelNames
from epd.request.context import RequestContext
from epd.spans import Tracer
from epd.tenants import ApiKeys

CONFIG = web.AppKey("config", LiveConfig)
KEYS = web.AppKey("keys", ApiKeys)
"""There only where keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Whom each handler answers."""
ADMISSION = web.AppKey("admission", Admission)
BACKGROUND = web.AppKey("background", Background)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
MODELS = web.AppKey("models", ModelNames)
TRACER = web.AppKey("tracer", Tracer)
"""There only where requests are traced."""
CONTEXT = web.RequestKey("context", RequestContext)
ROUTE = web.RequestKey("route", str)
"""Path of the route that its target names, where that has other methods than the request's."""
BODY = web.RequestKey("body", Held)
"""What the body is counted with as it is read."""
STREAM = web.RequestKey("stream", web.StreamResponse)
"""Its answer, where that is a stream."""
ANSWERED = web.RequestKey("answered", int)
"""Its status, set once the client has all of its answer and may leave."""

UNKNOWN = "unknown"
"""The name of what is no route."""
