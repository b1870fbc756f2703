"""File systems on which this machine's files are."""

import logging
import os
from pathlib import Path

import pytest

from ec_store import open_store
from ec_store.disk import mounts
from ec_store.disk.mounts import file_system_kind, kind_of

TABLE = """\
22 28 0:20 / /proc rw,nosuid - proc proc rw
28 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid shared:4 master:2 - tmpfs tmpfs rw,size=1G
31 28 254:1 /a\\040-\\040b /mnt/a\\040-\\040b rw - xfs /dev/vdb rw
""".splitlines()


@pytest.mark.parametrize(
    ("device", "kind"),
    [((254, 0), "ext4"), ((0, 25), "tmpfs"), ((254, 1), "xfs"), ((0, 2), None), ((54, 0), None)],
)
def test_a_device_has_a_file_system(device: tuple[int, int], kind: str | None) -> None:
    assert kind_of(os.makedev(*device), TABLE) == kind
    assert kind_of(os.makedev(*device), ["", "x", " - "]) is None


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext4", "nfs4"])
def test_a_store_knows_whether_it_is_in_memory_and_warns_if_it_is_not_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    device = tmp_path.stat().st_dev
    number, table = f"{os.major(device)}:{os.minor(device)}", tmp_path / "mountinfo"
    monkeypatch.setattr(mounts, "TABLE", table)
    table.write_text(f"28 1 {number} / / rw - {kind} x rw\n")
    with open_store(f"file://{tmp_path}/store") as store:
        assert store.in_memory is (kind in {"tmpfs", "ramfs"})

    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert ["of type nfs4" in text for text in warnings] == [True] * (kind == "nfs4")


def test_a_closed_store_is_not_in_memory(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/store", lazy=True) as store:
        assert not store.in_memory


def test_a_system_without_the_table_has_no_types_of_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "TABLE", tmp_path / "none")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert file_system_kind(fd) is None
    finally:
        os.close(fd)
