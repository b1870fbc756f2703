"""Fixtures of the security tests."""

from tests.proxy.conftest import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]
