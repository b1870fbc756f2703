"""Fixtures for the tests of media: those of the proxy tests."""

from tests.support.fixtures import origin

__all__ = ["origin"]
