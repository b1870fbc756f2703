"""A proxy that serves multimodal models on vLLM with disaggregated encoders."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from epd.version import __version__

if TYPE_CHECKING:
    from epd.config import ProxyConfig
    from epd.server.app import create_app

__all__ = ["ProxyConfig", "__version__", "create_app"]

MODULES = {"ProxyConfig": "epd.config", "create_app": "epd.server.app"}

if not TYPE_CHECKING:  # mypy would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name at its first use: most commands of `epd` do without the proxy."""
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(MODULES[name]), name)
