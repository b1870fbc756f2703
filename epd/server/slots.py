"""What the application holds, by typed keys."""

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
"""There only where keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Whom each handler answers."""
ADMISSION = web.AppKey("admission", Admission)
BACKGROUND = web.AppKey("background", Background)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
MODELS = web.AppKey("models", ModelNames)
TRACER = web.AppKey("tracer", Tracer)
"""There only where requests are traced."""
UNKNOWN = "unknown"
"""The name of what is no route."""
