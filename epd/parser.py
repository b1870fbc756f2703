"""Argument parser of all commands: errors in one line each, with a suggestion for unknown flags."""

import argparse
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias
from urllib.parse import urlsplit

from epd.version import __version__

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line each, without the usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def add_version(self) -> None:
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message alone."""
        self.errors([f"{message} (--help lists the flags)"])

    def errors(self, reasons: Iterable[str]) -> NoReturn:
        """Exit with code 2 and one line for each reason."""
        lines = [f"{self.prog}: error: {reason}\n" for reason in reasons]
        self.exit(USAGE_ERROR, "".join(lines))

    def parse_known_args(  # type: ignore[override]  # an unknown flag is an error
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, but exit at an unknown flag and suggest the nearest one."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._suggest_flag(rest)}")
        return parsed, rest

    def _suggest_flag(self, rest: Iterable[str]) -> str:
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in rest:
            flag = word.partition("=")[0]
            if word.startswith("-") and (near := get_close_matches(flag, known, n=1)):
                return f"; is {near[0]} meant?"
        return ""


def flag_of(field: str) -> str:
    """Return the flag of a setting."""
    return "--" + field.replace("_", "-")


def admin_key() -> str | None:
    """Return the operator's key from the environment, as for `epd serve`; None without one."""
    return os.environ.get("EPD_ADMIN_API_KEY") or os.environ.get("ADMIN_API_KEY")


def http_url(text: str) -> str:
    """Return a URL from the command line, without a slash at its end.

    Raises:
        ArgumentTypeError: it is no http(s) URL.
    """
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http(s) URL")
    return text.rstrip("/")


def unknown_message(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown variable or key, with the nearest known one."""
    nearest = get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; is {nearest[0]} meant?" if nearest else "")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - it has no public name
"""The place to which a command adds its subcommand. Each sets `run`, called with the flags by
name."""
