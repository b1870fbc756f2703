"""Fixtures of the fault tests: those of the proxy's."""

from tests.proxy.conftest import keys, launch

__all__ = ["keys", "launch"]
