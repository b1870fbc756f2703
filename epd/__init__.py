"""A proxy that serves multimodal models on vLLM with disaggregated encoders."""

from epd.config import ProxyConfig
from epd.server.app import create_app
from epd.version import __version__

__all__ = ["ProxyConfig", "__version__", "create_app"]
