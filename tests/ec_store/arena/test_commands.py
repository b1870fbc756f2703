"""Commands of `ec-store` on the memory of a host, and where they find its server."""

import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from ec_store.__main__ import main
from ec_store.arena.sockets import default_socket, find_sockets, runtime_folder
from ec_store.arena.url import arena_options
from ec_store.keys import EntryKey
from ec_store.opening import open_store
from tests.ec_store.arena.served import serving
from tests.ec_store.entries import entry
from tests.support.own_sockets import use_own_sockets

KEY = EntryKey("ns", "k")


@pytest.fixture(autouse=True)
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a temporary folder, with a short path, for the folders of all sockets."""
    with tempfile.TemporaryDirectory() as name:
        use_own_sockets(Path(name), monkeypatch)
        yield Path(name)


@pytest.fixture
def path() -> Path:
    """Return a socket of a fleet."""
    made = runtime_folder() / "epd-up-8000" / "arena.sock"
    made.parent.mkdir(mode=0o700, parents=True)
    return made


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_stat_finds_the_memory_of_this_host(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(path), open_store(f"shm://{path}") as store:
        store.put(KEY, entry())
        store.register_namespace("m", "ns")
        held = store.get(KEY)
        code, out, _ = run(capsys, "stat")
        found = json.loads(run(capsys, "stat", "--json")[1])
        del held

    assert code == 0
    assert "pinned     4.0 KiB, the oldest pin for 0 s\n" in out
    assert f"process    writer {os.getpid()}: 4.0 KiB pinned, 0 B begun\n" in out
    assert found["memory"]["pinned_bytes"] == 4096
    assert f"store      shm://{path}\nentries    1\n" in out
    assert "max_bytes  64.0 MiB" in out
    assert "model      m: ns" in out
    assert (found["url"], found["entries"]) == (f"shm://{path}", 1)


def test_all_commands_maintain_a_memory(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(path), open_store(f"shm://{path}") as store:
        store.put(KEY, entry())
        store.put(EntryKey("other", "k"), entry())

        assert run(capsys, "ls")[1].count("3x4") == 2
        assert run(capsys, "verify")[:2] == (0, "2 entries read, 0 corrupt\n")
        assert run(capsys, "purge", "--namespace", "other")[1] == "1 entries of other removed\n"
        code, out, _ = run(capsys, "gc")
        assert (code, out) == (0, "0 entries removed: its server evicts by itself\n")
        code, _, err = run(capsys, "configure", f"shm://{path}", "--max-bytes", "1GiB")
        assert (code, "a memory in the URL of its server" in err) == (2, True)
        assert store.lookup([KEY]) != [None]


def test_stat_shows_every_memory_and_other_commands_need_one(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = default_socket()
    with ExitStack() as servers:
        servers.enter_context(serving(path))
        servers.enter_context(serving(second))
        code, out, _ = run(capsys, "stat")
        refused, _, err = run(capsys, "purge", "--namespace", "ns")

    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("store ")] == [
        f"store      shm://{second}",
        f"store      shm://{path}",
    ]
    assert refused == 2
    assert f"name one: shm://{second} shm://{path}" in err


def test_sockets_without_a_server_or_of_another_user_are_not_found(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    code, _, _ = run(capsys, "stat")
    assert path.is_socket()
    assert find_sockets() == []
    assert str(code).startswith(f"ec-store: found no server of a memory in {runtime_folder()}")

    with serving(default_socket()), open_store("shm://") as store:
        assert find_sockets() == [default_socket()]
        default_socket().parent.chmod(0o777)
        assert find_sockets() == []
        default_socket().parent.chmod(0o700)
        store.check()  # the server has accepted the connections that looked for it


def test_a_memory_of_another_container_is_named_in_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, _ = run(capsys, "stat", "shm:///none/arena.sock")

    assert "of another container, its folder must be mounted into this one" in str(code)


def test_a_container_that_allows_no_memfd_is_told_what_to_use(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=refused))
    code, _, _ = run(capsys, "serve", f"shm://{path}?max_bytes=2MiB", "--port", "0")

    assert "no memory of 2.0 MiB: [Errno 38] Function not implemented: " in str(code)
    assert "use a store in a directory" in str(code)


@pytest.mark.parametrize("given", ["", "relative", f"/{'x' * 64}"])
def test_a_user_without_a_runtime_folder_has_one_in_tmp(
    given: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", given)

    assert runtime_folder() == run_folder / "ec-store-1234"


def test_a_url_without_a_path_is_that_of_the_user(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arena_options("shm://?max_bytes=2MiB").path == str(default_socket())
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    assert arena_options("shm://").path == f"{run_folder}/ec-store/arena.sock"
