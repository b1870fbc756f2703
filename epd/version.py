"""Version of the proxy, which is that of the store: they are released together."""

from ec_store.version import __version__

__all__ = ["__version__"]
