"""Fixtures of the discovery tests: those of the proxy's."""

from tests.support.fixtures import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]
