"""Events that happen once, between two steps of the code under test."""

from collections.abc import Callable
from typing import Any

import pytest


def before_next(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, happens: Callable[[], object]
) -> None:
    """Call `happens` once, before the next call of a function of a module or class."""
    real, left = getattr(owner, name), [happens]

    def call(*args: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


def after_next(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, happens: Callable[[Any], object]
) -> None:
    """Call `happens` once, with the result of the next call of a function."""
    real, left = getattr(owner, name), [happens]

    def call(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        if left:
            left.pop()(result)
        return result

    monkeypatch.setattr(owner, name, call)
