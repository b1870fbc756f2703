"""`epd` with `vllm` commands that are forked, not executed."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from unittest.mock import patch

from epd.__main__ import main
from scripts.forked import fork_vllm

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def run_vllm(
    words: Sequence[str], *, env: Mapping[str, str], **_: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a `vllm` command as `subprocess.run` does."""
    assert words[: len(VLLM)] == VLLM
    with fork_vllm(words[len(VLLM) :], env, sys.stdout.fileno()) as program:
        return subprocess.CompletedProcess(words, program.wait())


if __name__ == "__main__":
    with patch.object(subprocess, "run", run_vllm):
        main()
