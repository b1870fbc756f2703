"""Writers and readers of a full memory, for some seconds; `soak.py` runs longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ec_store.arena.served import MIB, Serve
from tests.paths import ROOT


@pytest.mark.full
@pytest.mark.fault(122)
def test_no_byte_is_wrong_no_pin_lost_and_every_count_exact_in_a_full_memory(
    tmp_path: Path,
) -> None:
    served = Serve(tmp_path / "arena.sock", max_bytes=32 * MIB)
    served.start()
    try:
        command = [
            sys.executable,
            "-m",
            "tests.ec_store.arena.soak",
            f"shm://{tmp_path}/arena.sock",
        ]
        few = ["--writers", "2", "--readers", "2", "--pool-bytes", "100MiB", "--seconds", "20"]
        ended = subprocess.run(
            [*command, *few], cwd=ROOT, capture_output=True, text=True, check=False
        )
    finally:
        served.kill()

    assert ended.returncode == 0, ended.stdout + ended.stderr
    for result in ("written", "there already", "found", "missing"):
        assert result in ended.stdout
