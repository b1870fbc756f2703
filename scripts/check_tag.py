"""Check that a tag is this version and in CHANGELOG.md: `python -m scripts.check_tag v0.2.0`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ec_store.version import __version__

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def problems(tag: str, version: str, changelog: str) -> Sequence[str]:
    """Return what keeps the tag from being a release."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag} and the version {version}: tag v{version}")
    if not re.search(rf"^## {re.escape(version)}(?: |$)", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## {version}': rename 'Unreleased'")
    return found


if __name__ == "__main__":
    [_, given] = sys.argv
    if refused := problems(given, __version__, CHANGELOG.read_text()):
        sys.exit("\n".join(refused))
