"""Command line of the store."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from ec_store import EntryKey, open_store
from ec_store.__main__ import main
from ec_store.testing.stores import another_release, unchecked
from tests.ec_store.entries import entry

KEY = EntryKey("ns", "k")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?max_bytes=1MiB"


@pytest.mark.parametrize(
    ("bound", "warned"),
    [
        (("127.0.0.1", ""), False),
        (("localhost", ""), False),
        (("::1", ""), False),
        (("0.0.0.0", ""), True),  # noqa: S104 - it is not bound
        (("store.example", ""), True),
        (("0.0.0.0", "secret"), False),  # noqa: S104 - it is not bound
    ],
)
def test_serve_warns_of_an_open_address_without_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound: tuple[str, str],
    warned: bool,
) -> None:
    host, key = bound
    monkeypatch.setattr(web, "run_app", lambda *_, **__: None)
    monkeypatch.setenv("EC_STORE_API_KEY", key)
    with pytest.raises(SystemExit):
        main(["serve", f"file://{tmp_path}/store", "--host", host])

    assert ("EC_STORE_API_KEY" in capsys.readouterr().err) is warned


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    return ended.value.code, capsys.readouterr().out


def test_the_command_line(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url) as store:
        store.put(KEY, entry())
        store.put(EntryKey("other", "k"), entry())
        store.register_namespace("m", "ns")

    code, out = run(capsys, "stat", url, "--json")
    stat = json.loads(out)
    assert (code, stat["entries"], stat["namespaces"]) == (0, 2, {"m": "ns"})
    code, out = run(capsys, "stat", url)
    assert "1.0 MiB" in out
    assert "m: ns" in out
    code, out = run(capsys, "ls", url)
    assert out.count("3x4") == 2
    code, out = run(capsys, "ls", url, "--json")
    assert {json.loads(line)["namespace"] for line in out.splitlines()} == {"ns", "other"}
    code, out = run(capsys, "purge", url, "--namespace", "other")
    assert "1 entries of other removed" in out
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "1 entries read, 0 corrupt\n")
    code, out = run(capsys, "gc", url, "--json")
    assert json.loads(out) == {"removed": 0}


def test_verify_names_the_corrupt_ones_and_fixes_them(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(url) as store:
        store.put(KEY, entry())
    [path] = [path for path in tmp_path.rglob(f"{KEY.digest}*") if path.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    code, out = run(capsys, "verify", url)
    assert code == 1
    assert "CORRUPT" in out
    code, _ = run(capsys, "verify", url, "--fix")
    assert code == 0
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "0 entries read, 0 corrupt\n")


@pytest.mark.fault(20)
def test_verify_survives_malformed_entries(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url) as store:
        store.put(KEY, unchecked(entry(), shape=(-3, -4)))
        store.put(EntryKey("ns", "floats"), unchecked(entry(), shape=(3.0, 4.0)))
        store.put(EntryKey("ns", "good"), entry())

    code, out = run(capsys, "verify", url)
    assert code == 1
    assert out.count("CORRUPT") == 2
    code, out = run(capsys, "verify", url, "--fix")
    assert (code, "2 corrupt, deleted" in out) == (0, True)
    code, out = run(capsys, "verify", url)
    assert (code, out) == (0, "1 entries read, 0 corrupt\n")


@pytest.mark.fault(93)
def test_verify_keeps_entries_of_another_format(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(url) as store, another_release():
        store.put(KEY, entry())

    code, out = run(capsys, "verify", url, "--fix")
    assert code == 0
    assert "SKIPPED: its format is ec_store/2" in out
    assert "1 entries read, 0 corrupt, 1 of other formats, not checked and kept" in out
    code, out = run(capsys, "verify", url, "--json")
    assert json.loads(out.splitlines()[-1]) == {
        "checked": 1,
        "corrupt": 0,
        "fixed": 0,
        "skipped": 1,
    }


@pytest.mark.parametrize("wrong", ["ftp://x", "file:///tmp/x?bogus=1", "file:///tmp/x?ttl=soon"])
def test_an_invalid_url_is_reported_in_one_line(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["stat", wrong])

    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
