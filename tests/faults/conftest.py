"""Fixtures for the fault tests: those of the proxy tests."""

from tests.support.fixtures import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]
