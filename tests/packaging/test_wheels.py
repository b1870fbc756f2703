"""Contents of the wheels, and the store alone in a new environment."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.environments import Environment, needs_wheels, wheel
from tests.paths import ROOT

pytestmark = [needs_wheels, pytest.mark.full]

USE = """
import sys
from ec_store import Entry, EntryKey, open_store

with open_store(f"file://{sys.argv[1]}/store") as store:
    entry = Entry(memoryview(bytes(16)), "F32", (2, 2), "image")
    assert store.put(EntryKey("ns", "a"), entry)
    assert store.get(EntryKey("ns", "a")) == entry
names = {name.partition(".")[0] for name in sys.modules}
assert not names & {"aiohttp", "epd", "prometheus_client", "redis"}, names
print("ok")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with `ec-store` and the packages that it requires."""
    environment = Environment(tmp_path_factory.mktemp("alone"))
    environment.install(wheel("ec_store"))
    return environment


@pytest.mark.parametrize(("name", "package"), [("ec_store", "ec_store"), ("epd_proxy", "epd")])
def test_a_wheel_has_all_files_of_its_package_and_no_other(name: str, package: str) -> None:
    with ZipFile(wheel(name)) as archive:
        packed = {each for each in archive.namelist() if ".dist-info/" not in each}

    assert f"{package}/py.typed" in packed
    assert {each.partition("/")[0] for each in packed} == {package}
    if (ROOT / package).exists():  # not in a copy of the tests alone
        kept = {"LICENSE", "README.md", "pyproject.toml"}  # of `ec-store`, in its sdist
        sources = {path for path in (ROOT / package).rglob("*") if path.is_file()}
        assert packed == {
            str(path.relative_to(ROOT))
            for path in sources
            if "__pycache__" not in path.parts and path.name not in kept
        }


def test_the_store_alone_brings_four_packages(
    alone: Environment,
) -> None:
    [site] = alone.folder.glob("lib/python*/site-packages")
    installed = {path.name.partition("-")[0].lower() for path in site.glob("*.dist-info")}

    assert installed == {"ec_store", "msgspec", "numpy", "orjson", "xxhash"}


def test_the_store_alone_keeps_entries(alone: Environment, tmp_path: Path) -> None:
    assert alone.run("python", "-c", USE, str(tmp_path)).stdout == "ok\n"
    shown = alone.run("ec-store", "stat", f"file://{tmp_path}/store").stdout
    assert "entries    1\n" in shown


@pytest.mark.parametrize(
    ("words", "extra"),
    [(("serve", "file://{}/store"), "serve"), (("stat", "redis://127.0.0.1:1"), "redis")],
)
def test_the_store_alone_names_the_extra_of_what_it_lacks(
    alone: Environment, tmp_path: Path, words: tuple[str, str], extra: str
) -> None:
    ran = alone.run("ec-store", words[0], words[1].format(tmp_path), check=False)

    assert ran.returncode == 2
    assert ran.stderr.endswith(f"pip install 'ec-store[{extra}]'\n")
