"""The fault tests use the fixtures of the proxy's."""

from tests.proxy.conftest import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]
