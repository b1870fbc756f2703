"""Settings that a shared directory keeps, and which directories a store accepts."""

import json
import logging
import os
import re
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import StoreUnavailable, open_store
from ec_store.__main__ import main
from ec_store.disk import opening
from ec_store.disk.config import (
    FORMAT,
    NAME,
    SettingsInvalid,
    StoreSettings,
)
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import opened
from tests.small_disk import small_disk
from tests.support.once import after_next

DAY_S = 86400.0
STRANGER = 54321

settings_of_any_store = st.builds(
    StoreSettings,
    max_bytes=st.integers(1, 2**63),
    max_share=st.floats(0.001, 1),
    ttl=st.floats(0.001, 1e12),
    dir_mode=st.integers(0, 0o7777),
)


@pytest.fixture
def foreign(root: Path) -> Path:
    """Return a store that another user created."""
    if os.geteuid():
        pytest.skip("only root may give a folder to another user")
    opened(root).close()
    os.chown(root, STRANGER, STRANGER)
    return root


def held(root: Path) -> StoreSettings:
    return StoreSettings.from_json((root / NAME).read_bytes())


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    captured = capsys.readouterr()
    return ended.value.code, captured.out + captured.err


@given(settings_of_any_store)
def test_read_settings_equal_the_written_ones(settings: StoreSettings) -> None:
    assert StoreSettings.from_json(settings.to_json()) == settings


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_any_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(SettingsInvalid):
        StoreSettings.from_json(content)


@pytest.mark.parametrize(
    "change",
    [
        {"max_bytes": 0},
        {"max_bytes": None},
        {"max_share": 0},
        {"max_share": 1.5},
        {"ttl_s": -1},
        {"ttl_s": "x"},
        {"dir_mode": "9"},
        {"dir_mode": 750},
    ],
)
def test_a_setting_out_of_range_is_refused(change: dict[str, object]) -> None:
    content = json.loads(StoreSettings().to_json()) | change

    with pytest.raises(SettingsInvalid, match="ec-store configure"):
        StoreSettings.from_json(json.dumps(content).encode())


def test_a_store_keeps_the_settings_of_its_creation(root: Path) -> None:
    opened(root, "max_bytes=1GiB&ttl=30d&dir_mode=0700").close()

    with opened(root) as store:
        assert store.settings == StoreSettings(max_bytes=2**30, ttl=30 * DAY_S, dir_mode=0o700)
        assert store.stats().max_bytes == 2**30
        store.put(key(), sized(10))
    entry = next(path for path in (root / "entries").rglob("*") if path.is_file())
    assert entry.stat().st_mode & 0o777 == 0o600
    assert entry.parent.stat().st_mode & 0o777 == 0o700


def test_a_url_with_other_settings_changes_nothing_and_is_logged_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(root, "max_bytes=2GiB&ttl=7d").close()
    with opened(root, "max_bytes=1GiB&ttl=7d", look_every_s=0) as store:
        for _ in range(3):
            store.lookup([key()])
        assert store.stats().max_bytes == 2 * 2**30

    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert "max_bytes=1.0 GiB (the store has 2.0 GiB)" in logged[0]
    assert "ttl" not in logged[0]


def test_unused_entries_outlive_a_command_without_the_parameters(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(root, "ttl=30d") as store:
        store.put(key(), sized(10))
        entry = next(path for path in (root / "entries").rglob("*") if path.is_file())
        old_s = time.time() - 8 * DAY_S
        os.utime(entry, (old_s, old_s))

        assert run(capsys, "gc", root.as_uri()) == (0, "0 entries removed\n")
        assert store.get(key()) is not None


def test_a_store_without_settings_is_adopted(root: Path) -> None:
    with opened(root) as store:
        store.put(key(), sized(10, 1))
    (root / NAME).unlink()

    with opened(root, "max_bytes=1GiB") as store:
        assert_same(sized(10, 1), store.get(key()))
    assert held(root).max_bytes == 2**30


def test_settings_of_the_first_creator_of_a_store_apply_to_both(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_next(
        monkeypatch,
        opening,
        "read_settings",
        lambda _: opened(root, "max_bytes=1GiB").close(),
    )
    with opened(root, "max_bytes=2GiB") as second:
        assert second.settings.max_bytes == 2**30
    assert held(root).max_bytes == 2**30


def test_open_refuses_a_store_with_another_format_version(root: Path) -> None:
    opened(root).close()
    content = json.loads((root / NAME).read_bytes()) | {"format": FORMAT + 1}
    (root / NAME).write_text(json.dumps(content))

    with pytest.raises(StoreUnavailable, match=f"format version {FORMAT + 1}"):
        opened(root)


def test_settings_that_change_are_followed_and_unreadable_ones_are_not(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(root, look_every_s=0) as store, opened(root) as other:
        other.configure(max_bytes=2**20)
        store.lookup([key()])
        assert store.settings.max_bytes == 2**20

        (root / NAME).write_bytes(b"{")
        for _ in range(3):
            assert store.put(key(), sized(10), replace=True) is True
        assert store.settings.max_bytes == 2**20
        assert [it.message for it in caplog.records if "keeps its settings" in it.message] == [
            caplog.messages[-1]
        ]


def test_configure_changes_given_settings_and_replaces_unreadable_ones(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = root.as_uri()
    assert run(capsys, "configure", url, "--max-bytes", "3GiB", "--ttl", "30d")[0] == 0
    assert held(root) == StoreSettings(max_bytes=3 * 2**30, ttl=30 * DAY_S)

    code, text = run(capsys, "configure", url, "--dir-mode", "2770", "--max-share", "0.25")
    assert code == 0
    assert [line.split() for line in text.splitlines()] == [
        ["max_bytes", "3.0", "GiB"],
        ["max_share", "0.25"],
        ["ttl", "2592000s"],
        ["dir_mode", "2770"],
    ]
    before = held(root)
    assert run(capsys, "configure", url)[0] == 0
    assert held(root) == before
    assert run(capsys, "configure", url, "--max-bytes", "0")[0] == 2
    with pytest.raises(SystemExit):
        main(["configure", url, "--max-bytes", "1Gx"])
    assert "--max-bytes: '1Gx' is not a size such as 64GiB" in capsys.readouterr().err
    assert held(root) == before

    (root / NAME).write_bytes(b"{}")
    code, _ = run(capsys, "configure", url)
    assert "ec-store configure" in str(code)
    assert run(capsys, "configure", url, "--max-bytes", "1GiB")[0] == 0
    assert held(root) == StoreSettings(max_bytes=2**30)


@pytest.mark.fault(24)
@pytest.mark.parametrize("content", [b"", b"\0\0", b'{\n "format": 1,\n "max_by'])
def test_store_with_settings_that_a_power_failure_cut_is_used_until_it_is_configured(
    root: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    with opened(root, "max_bytes=1GiB") as store:
        store.put(key(), sized(10))
    (root / NAME).write_bytes(content)
    with opened(root, create=False) as reader:
        assert_same(sized(10), reader.get(key()))
        assert reader.settings == StoreSettings()
    with opened(root, "max_bytes=2GiB") as store:
        assert_same(sized(10), store.get(key()))
        assert store.put(key("more"), sized(10)) is True
        assert store.settings == StoreSettings(max_bytes=2 * 2**30)
        assert (root / NAME).read_bytes() == content
        logged = [it for it in caplog.records if "This process uses" in it.message]
        assert [it.levelname for it in logged] == ["ERROR"] * 2
        with opened(root) as other:
            other.configure(max_bytes=3 * 2**30)
        assert held(root) == StoreSettings(max_bytes=3 * 2**30)


def test_configure_says_that_it_created_a_store(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["configure", root.as_uri(), "--max-bytes", "1GiB"])
        assert ended.value.code == 0
        said.append(capsys.readouterr().err)

    assert said == [f"ec-store: created a store in {root}, which had none\n", ""]


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "gc", "purge", "configure"])
def test_no_command_that_reads_makes_a_store(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = ("--namespace", "ns") if command == "purge" else ()
    code, _ = run(capsys, command, root.as_uri(), *more)

    assert code == f"ec-store: there is no store in {root}"
    assert not root.exists()

    root.mkdir()
    code, _ = run(capsys, command, root.as_uri(), *more)
    assert code == f"ec-store: there is no store in {root}"
    assert not list(root.iterdir())


def test_space_left_to_others_is_logged_unless_the_store_owns_the_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.ec_store")
    with small_disk(tmp_path / "disk", "2g") as disk:
        beside_others = disk.path / "store"
        for _ in range(2):  # as an engine does
            with opened(beside_others) as store:
                for number in range(3):
                    store.put(key(f"{number}"), sized(1000))
        [logged] = [one.message for one in caplog.records if "takes at most" in one.message]

        caplog.clear()
        disk.path.chmod(0o750)  # a tmpfs mounted without a mode is writable for all users
        with opened(disk.path) as store:
            store.put(key(), sized(1000))

    assert logged == (
        f"the encoder store in {beside_others} takes at most 1.00 GiB of a file system of "
        "2.00 GiB, and leaves 0.10 GiB of it free for others"
    )
    assert "takes at most" not in caplog.text


def test_a_redis_store_has_no_disk_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "configure", "redis://localhost:1")

    assert code == 2
    assert "maxmemory" in text


def test_a_store_of_another_user_is_refused(foreign: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"belongs to user {STRANGER}.*dir_mode=2770"):
        opened(foreign)
    with opened(foreign, "dir_mode=2770") as store:
        assert store.put(key(), sized(10)) is True


def test_a_folder_of_another_user_in_a_store_is_refused(root: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a folder to another user")
    opened(root).close()
    os.chown(root / "claims", STRANGER, STRANGER)

    with pytest.raises(StoreUnavailable, match=f"claims belongs to user {STRANGER}"):
        opened(root)


@pytest.mark.parametrize("folder", [".", "entries", "namespaces"])
def test_a_store_that_every_user_may_write_to_is_refused(root: Path, folder: str) -> None:
    opened(root).close()
    (root / folder).chmod(0o1777)

    with pytest.raises(StoreUnavailable, match="every user may write to"):
        opened(root, "dir_mode=2770")
    opened(root, "dir_mode=0777").close()


def test_a_lazy_store_waits_for_its_directory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with open_store(f"file://{blocked}/store", lazy=True) as store:
        assert store.get(key()) is None
        with pytest.raises(StoreUnavailable):
            store.put(key(), sized(10))
        blocked.unlink()
        assert store.put(key(), sized(10, 1)) is True
        assert_same(sized(10, 1), store.get(key()))


def test_a_new_lazy_store_has_no_namespaces(root: Path) -> None:
    with open_store(root.as_uri(), lazy=True) as store:
        assert store.namespaces() == {}
        store.register_namespace("m", "ns")
        assert store.namespaces() == {"m": "ns"}
    with open_store(f"{root.as_uri()}-other", lazy=True, create=False) as store:
        with pytest.raises(StoreUnavailable):
            store.namespaces()
        assert not root.with_name("store-other").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:relative", "'relative' is not an absolute path"),
        ("file://", "'' is not an absolute path"),
        ("file://host/store", "'file://host/store' is not file:///path"),
        ("file:///store?ttl=0", "ttl must be greater than 0"),
        ("file:///store?max_bytes=0", "max_bytes and ttl must be greater than 0"),
        ("file:///store?max_entry_bytes=0", "max_entry_bytes must be greater than 0"),
        ("file:///store?max_share=0", "max_share must be greater than 0 and at most 1"),
        ("file:///store?max_share=1.1", "max_share must be greater than 0 and at most 1"),
        ("file:///store?max_share=half", "parameter 'max_share': could not convert"),
        ("file:///store?dir_mode=999", "parameter 'dir_mode': invalid literal"),
        ("file:///store?dir_mode=17777", "'17777' is not a mode such as 0750"),
        ("file:///store?nonsense=1", "unknown parameter 'nonsense'; known: dir_mode, max_bytes"),
        ("file:///store%00", "is not an absolute path"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        open_store(url)


@pytest.mark.security("S14")
def test_modes_do_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        with opened(root, "dir_mode=2770") as store:
            store.put(key(), entry())
            store.lease([key()], 5)
            store.register_namespace("m", "n")
    finally:
        os.umask(before)
    modes = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [root, *root.rglob("*")]
    }

    assert modes == {(True, 0o2770), (False, 0o660)}
