"""Fixtures of the security tests."""

from tests.proxy.conftest import keys, launch

__all__ = ["keys", "launch"]
