"""Backends that distributions register for the schemes of URLs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store import backends, check_url, open_store
from ec_store.disk.store import SharedDiskStore
from ec_store.opening import open_tier

OWN = """
from ec_store.backends import Backend
from ec_store.disk.backend import BACKEND as FILE

def check(url):
    if "good" not in url:
        raise ValueError("not good")

BACKEND = Backend(
    check=check,
    open=lambda url, create, lazy: FILE.open(url.replace("mine", "file", 1), create, lazy),
    fetch_threads=7,
)
NOT_ONE = 1
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a distribution with a backend, as files that the import system finds."""
    (tmp_path / "my_backend.py").write_text(OWN)
    information = tmp_path / "mine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[{backends.GROUP}]\nmine = my_backend:BACKEND\nother = my_backend:NOT_ONE\n"
        "file = my_backend:BACKEND\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    backends._backend.cache_clear()  # noqa: SLF001
    yield tmp_path
    sys.modules.pop("my_backend", None)
    backends._backend.cache_clear()  # noqa: SLF001


def test_a_registered_scheme_is_checked_and_opened(installed: Path) -> None:
    url = f"mine://{installed}/good"

    assert check_url(url) == url
    backend = backends.find_backend(url)
    assert (backend.fetch_threads, backend.writing_bytes(url)) == (7, None)
    with open_store(url) as store:
        assert isinstance(store, SharedDiskStore)
    with pytest.raises(ValueError, match="not good"):
        check_url("mine:///bad")


def test_a_scheme_of_two_distributions_is_refused(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"several distributions register file://: .*my_backend"):
        check_url(f"file://{installed}/good")


def test_an_entry_point_that_is_no_backend_is_refused(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"my_backend:NOT_ONE is not an ec_store.backends.Backend"):
        check_url("other:///x")


def test_an_unknown_scheme_names_those_that_are_registered(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"use one of file://, .*mine://, .*redis://.*shm://"):
        check_url("unknown:///x")


def test_the_memory_of_a_host_is_no_tier() -> None:
    with pytest.raises(ValueError, match="cannot be a tier"):
        open_tier("shm:///tmp/ec.sock")


def test_mooncake_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)

    with pytest.raises(ValueError, match=r"pip install 'ec-store\[mooncake\]'"):
        open_tier("mooncake://master")
