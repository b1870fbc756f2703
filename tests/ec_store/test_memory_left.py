"""Memory that is left on the machine and within the limits of control groups."""

from pathlib import Path

import pytest

from ec_store.memory_left import available_bytes

MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  8000 kB\nHugePages_Total:  0\n"}
MACHINE_BYTES = 8000 * 1024
SECOND, FIRST = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def group(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """Return the files of a control group, of the version that the folder is of."""
    names = ("limit_in_bytes", "usage_in_bytes") if FIRST in folder else ("max", "current")
    prefix = "total_" if FIRST in folder else ""
    return {
        f"{folder}/memory.{names[0]}": f"{limit}\n",
        f"{folder}/memory.{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\n{prefix}inactive_file {cache}\nshmem 7\n",
    }


@pytest.mark.fault(88)
@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (MACHINE, MACHINE_BYTES),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group(SECOND, "max", 5)}, MACHINE_BYTES),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group(SECOND, "1000", 300)}, 700),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group(SECOND, "1000", 300, 200)}, 900),
        (
            {
                "proc/self/cgroup": "0::/pod/engine\n",
                **group(f"{SECOND}/pod", "1000", 900),
                **group(f"{SECOND}/pod/engine", "max", 5),
            },
            100,
        ),
        (
            {"proc/self/cgroup": "9:cpu:/x\n4:memory:/docker/1\n0::/\n", **group(FIRST, "1000", 1)},
            999,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/pod\n",
                **group(FIRST, "9223372036854771712", 1),
                **group(f"{FIRST}/pod", "1000", 1200, 300),
            },
            100,
        ),
        ({"proc/self/cgroup": "0::/\n", **group(SECOND, "1000", 1200)}, 0),
        ({"proc/self/cgroup": "0::/../other\n", **group(SECOND, "1000", 1)}, 999),
    ],
    ids=[
        *("no proc", "machine", "second, no limit", "second", "second, page cache", "parent"),
        *("first, path of the host", "first, page cache", "above the limit", "path outside"),
    ],
)
def test_the_smallest_rest_of_machine_and_control_groups_is_available(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    assert available_bytes(tmp_path) == left


def test_available_bytes_of_this_machine_are_known() -> None:
    assert (available_bytes() or 0) > 0
