"""Typed keys of the objects that the application holds."""

from collections.abc import Mapping, Sequence

from aiohttp import web

from epd.background import Background
from epd.config.live import LiveConfig
from epd.edge.access import Access
from epd.edge.admission import Admission
from epd.events import Observer
from epd.models import ModelNames
from epd.spans import Tracer
from epd.tenants import ApiKeys

CONFIG = web.AppKey("config", LiveConfig)
KEYS = web.AppKey("keys", ApiKeys)
"""Set only if API keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Class of access of each handler."""
ADMISSION = web.AppKey("admission", Admission)
BACKGROUND = web.AppKey("background", Background)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
MODELS = web.AppKey("models", ModelNames)
TRACER = web.AppKey("tracer", Tracer)
"""Set only if requests are traced."""
UNKNOWN = "unknown"
"""Name of the route for all unknown paths."""
