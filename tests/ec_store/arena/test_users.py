"""Users of a host: the modes of the socket and of its folder decide which of them may connect."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import GetStats
from ec_store.arena.server import DESCRIPTORS_EACH, OTHER_DESCRIPTORS
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import Serve, opened
from tests.ec_store.children import ended, start

GROUP = 54320
USER = 54321

pytestmark = pytest.mark.fault(127)


@pytest.fixture
def path() -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("only root may run code as another user")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chown(folder, 0, GROUP)
        Path(folder).chmod(0o2750)
        yield Path(folder) / "arena.sock"


def by_user(call: Callable[[], object], *groups: int) -> None:
    """Run a call in a child of another user."""
    assert ended(start(call, USER, groups)) == 0


@pytest.mark.parametrize(("mode", "groups"), [("0600", [GROUP]), ("0660", []), ("0660", [7])])
def test_modes_of_the_socket_refuse_another_user(path: Path, mode: str, groups: list[int]) -> None:
    served = Serve(path, mode=mode)
    served.start()

    def refused() -> None:
        with opened(path) as store, pytest.raises(StoreUnavailable, match="Permission denied"):
            store.lookup([key()])

    try:
        by_user(refused, *groups)
    finally:
        served.kill()


def test_users_of_a_group_share_entries(path: Path) -> None:
    served = Serve(path, mode="0660")
    served.start()

    def use() -> None:
        with opened(path) as store:
            assert_same(sized(100, 1), store.get(key()))
            assert store.put(key("other"), sized(100, 2)) is True

    try:
        with opened(path) as store:
            store.put(key(), sized(100, 1))
            by_user(use, GROUP)
            assert_same(sized(100, 2), store.get(key("other")))
    finally:
        served.kill()


def test_one_user_takes_no_connection_from_another(path: Path) -> None:
    files = OTHER_DESCRIPTORS + DESCRIPTORS_EACH * 20
    served = Serve(path, mode="0660", open_files=(files, files))
    served.start()

    def use() -> None:
        with opened(path) as store:
            assert store.lookup([key()]) == [None]

    try:
        with ExitStack() as stack:
            for _ in range(10):
                client = stack.enter_context(closing(ArenaConnection(str(path), "proxy", 10)))
                client.call(GetStats())
            by_user(use, GROUP)
            more = stack.enter_context(closing(ArenaConnection(str(path), "proxy", 10)))
            with pytest.raises(StoreUnavailable, match="user 0 has 10 connections"):
                more.call(GetStats())
    finally:
        served.kill()
