"""Fixtures of the discovery tests: those of the proxy's."""

from tests.proxy.conftest import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]
