"""Directory of a store that is removed, replaced, made read-only or closed."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ec_store import StoreUnavailable
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import opened


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 1 MiB; only root may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield mount
    subprocess.run(["/bin/umount", "-l", str(mount)], check=True)


@pytest.mark.parametrize("looks", [False, True])
def test_a_directory_that_was_removed_is_a_miss_and_made_again(root: Path, looks: bool) -> None:
    store = opened(root, look_every_s=0 if looks else 1000)
    store.put(key(), entry())
    shutil.rmtree(root)

    assert store.get(key()) is None
    assert store.lookup([key()]) == [None]
    assert store.lease([key()], 5) == [None]
    if looks:
        with pytest.raises(StoreUnavailable, match="entries could not be deleted"):
            store.delete([key()])
    else:
        assert store.delete([key()]) == 0
    assert store.put(key(), entry()) is True
    assert_same(entry(), store.get(key()))


def test_a_directory_that_was_replaced_is_used(root: Path) -> None:
    store = opened(root, look_every_s=0)
    store.put(key(), sized(10, 1))
    root.rename(root.with_name("old"))
    with opened(root) as other:
        other.put(key(), sized(10, 2))

    assert_same(sized(10, 2), store.get(key()))


def test_get_misses_after_the_directory_was_replaced_by_a_link_to_itself(root: Path) -> None:
    store = opened(root, look_every_s=0)
    shutil.rmtree(root)
    root.symlink_to(root)

    assert store.get(key()) is None
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        store.put(key(), sized(10))


def test_a_directory_that_became_a_file_is_a_miss_and_unavailable(root: Path) -> None:
    store = opened(root, look_every_s=0)
    shutil.rmtree(root)
    root.write_text("no directory")

    assert store.get(key()) is None
    assert store.lookup([key()]) == [None]
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put(key(), entry()),
        lambda: list(store.ls()),
        store.stats,
        store.evict,
        lambda: store.purge("n"),
        store.namespaces,
        lambda: store.delete([key()]),
        lambda: store.register_namespace("m", "n"),
        lambda: opened(root),
    )
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()


def test_a_read_only_store_is_read_and_not_written(small_disk: Path) -> None:
    with opened(small_disk / "store") as store:
        store.put(key(), entry())
        subprocess.run(["/bin/mount", "-o", "remount,ro", str(small_disk)], check=True)

        assert_same(entry(), store.get(key()))
        assert store.lookup([key()])[0] is not None
        assert store.lease([key()], 5) == [None]
        with pytest.raises(StoreUnavailable):
            store.put(key("more"), entry())
        with pytest.raises(StoreUnavailable):
            store.sweep()
        with pytest.raises(StoreUnavailable):
            opened(small_disk / "store")


def test_get_of_a_closed_store_raises_store_unavailable(root: Path) -> None:
    store = opened(root)
    store.close()

    with pytest.raises(StoreUnavailable):
        store.get(key())
