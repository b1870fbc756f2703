"""A proxy that serves multimodal models on vLLM with disaggregated encoders."""

from epd.config import ProxyConfig
from epd.version import __version__
from epd.web import create_app

__all__ = ["ProxyConfig", "__version__", "create_app"]
