"""What the distributions `ec-store` and `epd-proxy` say of themselves, as they are installed."""

import json
from importlib.metadata import PackageNotFoundError, distribution, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ec_store.version
import epd
from tests.paths import ROOT

MOST = 6
"""Packages that `ec-store` may add to an environment of vLLM."""


def required(name: str, *extras: str) -> list[Requirement]:
    """Return the requirements of a distribution with extras."""
    found = [Requirement(text) for text in requires(name) or []]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def names(name: str, *extras: str) -> set[str]:
    return {canonicalize_name(one.name) for one in required(name, *extras)}


def brought(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Add the names of all packages that a package needs, and of those that they need."""
    name = canonicalize_name(name)
    if name in found and extras <= found[name]:
        return
    found[name] = found.get(name, frozenset()) | extras
    try:
        needed = required(name, "", *extras)
    except PackageNotFoundError:  # for another platform
        return
    for one in needed:
        brought(one.name, frozenset(one.extras), found)


def test_distributions_have_the_version_of_the_code() -> None:
    assert version("ec-store") == version("epd-proxy") == ec_store.version.__version__
    assert epd.__version__ == ec_store.version.__version__


def test_the_proxy_requires_the_store_of_its_own_version() -> None:
    [store] = [one for one in required("epd-proxy") if one.name == "ec-store"]

    assert str(store.specifier) == f"=={epd.__version__}"
    assert store.extras == {"redis", "serve"}


def test_the_store_requires_little() -> None:
    assert names("ec-store") == {"msgspec", "numpy", "orjson", "xxhash"}
    assert names("ec-store", "redis") - names("ec-store") == {"hiredis", "redis"}
    assert names("ec-store", "serve") - names("ec-store") == {
        "aiohttp",
        "prometheus-client",
        "uvloop",
    }


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("extras", "added"),
    [
        ((), {"orjson", "xxhash"}),
        (("redis",), {"orjson", "xxhash", "redis", "hiredis"}),
        (("serve",), {"orjson", "xxhash"}),
    ],
)
def test_vllm_brings_most_of_what_the_store_requires(
    extras: tuple[str, ...], added: set[str]
) -> None:
    of_vllm: dict[str, frozenset[str]] = {}
    brought("vllm", frozenset(), of_vllm)
    ours: dict[str, frozenset[str]] = {}
    brought("ec-store", frozenset(extras), ours)

    assert {*ours} - {*of_vllm, "ec-store"} == added
    assert len(added) <= MOST


def test_the_server_does_not_bound_aiohttp_as_the_proxy_does() -> None:
    [ours] = [one for one in required("ec-store", "serve") if one.name == "aiohttp"]
    [proxys] = [one for one in required("epd-proxy") if one.name == "aiohttp"]

    assert ours.specifier.contains("3.99")
    assert not proxys.specifier.contains("3.99")


def test_each_command_and_entry_point_is_in_the_distribution_of_its_package() -> None:
    for name, package in (("ec-store", "ec_store"), ("epd-proxy", "epd")):
        points = distribution(name).entry_points

        assert {point.value.partition(".")[0] for point in points} == {package}
        assert [point.name for point in points if point.group == "console_scripts"] == [
            name.removesuffix("-proxy")
        ]
    assert {point.name for point in entry_points(group="ec_store.backends")} >= {"file", "redis"}


def test_distributions_have_the_license() -> None:
    assert (ROOT / "LICENSE").exists()
    for name in ("ec-store", "epd-proxy"):
        text = distribution(name).read_text("licenses/LICENSE")
        assert text == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("name", "file"), [("ec-store", ec_store.version.__file__), ("epd-proxy", epd.__file__)]
)
def test_a_wheel_is_imported_from_where_it_is_installed(name: str, file: str) -> None:
    installed = distribution(name)
    url = json.loads(installed.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable"):
        pytest.skip("this environment has an editable install")

    assert Path(file).is_relative_to(Path(str(installed.locate_file(""))))
    assert not Path(file).is_relative_to(ROOT)
