"""Transfers of other packages, named by entry points."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ValidationError

from epd import ProxyConfig
from epd.transfer.ec import ECTransfer
from epd.transfer.kv import WithoutParams
from epd.transfer.registry import EC_GROUP, KV_GROUP, load_ec_transfer, load_kv_transfer

URLS = {"encode_servers_urls": ("http://e",), "decode_servers_urls": ("http://d",)}


class Beamed(WithoutParams):
    name = "beamed"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with transfers, of which some cannot be used."""
    module = ModuleType("beaming")
    vars(module).update(Beamed=Beamed, handed=ECTransfer(handle=("place",)), text="no transfer")
    monkeypatch.setitem(sys.modules, "beaming", module)
    info = tmp_path / "beaming-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: beaming\nVersion: 1\n")
    lines = [f"[{KV_GROUP}]", "beamed = beaming:Beamed", "text = beaming:text", "away = gone:Away"]
    lines += [f"[{EC_GROUP}]", "handed = beaming:handed", "ectext = beaming:text"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("install")
def test_a_transfer_of_another_package_is_used() -> None:
    config = ProxyConfig(**URLS, kv_transfer="beamed", ec_transfer="handed")

    assert (config.kv_transfer, config.ec_transfer) == ("beamed", "handed")
    assert isinstance(load_kv_transfer(config.kv_transfer), Beamed)
    assert load_ec_transfer(config.ec_transfer).handle == ("place",)


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "'text' of epd.kv_transfers is no subclass of KVTransfer"),
        ("away", "'away' of epd.kv_transfers: No module named 'gone'"),
        ("nixI", "there is no transfer 'nixI', only nixl, nixl-push, .*none, away, beamed, "),
    ],
)
def test_a_transfer_that_cannot_be_used_is_an_error_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProxyConfig(**URLS, kv_transfer=name)


@pytest.mark.usefixtures("install")
def test_an_encoder_transfer_that_cannot_be_used_is_an_error_at_the_start() -> None:
    with pytest.raises(ValidationError, match=r"'ectext' of epd.ec_transfers is no ECTransfer"):
        ProxyConfig(**URLS, ec_transfer="ectext")
    with pytest.raises(
        ValidationError, match=r"there is no transfer 'disk', only store, example, .*, handed"
    ):
        ProxyConfig(**URLS, ec_transfer="disk")


def test_moriio_is_an_entry_point_of_this_package() -> None:
    assert load_kv_transfer("moriio").name == "moriio"
