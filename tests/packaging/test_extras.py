"""Parts of the store that need packages of an extra."""

import sys
from pathlib import Path

import pytest

import ec_store.__main__
from ec_store import open_store


def without(monkeypatch: pytest.MonkeyPatch, package: str, importer: str) -> None:
    """Make a package fail to import, as if it were not installed."""
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(importer)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_a_store_in_redis_names_its_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    without(monkeypatch, package, "ec_store.redis.")

    with pytest.raises(
        ValueError,
        match=rf"the package {package} is not installed: pip install 'ec-store\[redis\]'",
    ):
        open_store("redis://127.0.0.1:1")


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client", "uvloop"])
def test_the_server_names_its_extra(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    package: str,
) -> None:
    without(monkeypatch, package, "ec_store.serv")

    with pytest.raises(SystemExit, match="2"):
        ec_store.__main__.main(["serve", f"file://{tmp_path}/store"])
    message = f"the package {package} is not installed: pip install 'ec-store[serve]'"
    assert capsys.readouterr().err == f"ec-store: error: {message}\n"
