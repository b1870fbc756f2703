"""Fixtures for the fault tests: those of the proxy tests."""

from tests.support.fixtures import backed, keys, launch, store, url
from tests.support.system_names import system

__all__ = ["backed", "keys", "launch", "store", "system", "url"]
