"""Nothing that docs/compatibility.md promises goes without notice in an earlier minor release."""

import re
from collections.abc import Mapping

import pytest

from epd.version import __version__
from tests.compat.releases import Release
from tests.compat.surface import recorded, surface
from tests.paths import ROOT
from tests.support.programs import called

Minor = tuple[int, int]
"""Major and minor number of a release."""

ROW = re.compile(r"^\| `([^`]+)` \| (\d+\.\d+) \| .+ \|$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
GONE = "is gone or has another meaning, and was not deprecated in an earlier minor release"


def minor_of(version: str) -> Minor:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def deprecated() -> dict[str, Minor]:
    """Return the names in the table of the document, with the release that deprecated each."""
    text = (ROOT / "docs/compatibility.md").read_text().partition("### Deprecated")[2]
    return {name: minor_of(release) for name, release in ROW.findall(text.partition("\n## ")[0])}


def broken(
    promised: Mapping[str, str],
    found: Mapping[str, str],
    announced: Mapping[str, Minor],
    release: Minor,
) -> list[str]:
    """Return the promises that a release breaks: names that are gone, or have another meaning.

    It may break those that an earlier minor release has announced. New names break nothing.
    """
    return [
        f"{name}: {meaning!r}, now {found.get(name)!r}"
        for name, meaning in promised.items()
        if found.get(name) != meaning and not announced.get(name, release) < release
    ]


def test_promised_names_have_their_meaning() -> None:
    found = surface()
    promised = recorded()

    assert broken(promised, found, deprecated(), minor_of(__version__)) == [], (
        f"{GONE}: list it under Deprecated in docs/compatibility.md. If no release has it yet, "
        "write promises.txt again (tests/compat/surface.py)"
    )
    assert [name for name in deprecated() if name not in promised | found] == []


@pytest.mark.parametrize(
    ("found", "announced", "kept"),
    [
        ({"setting --a": "int = 1"}, {}, True),
        ({"setting --a": "int = 1", "setting --b": "int = 1"}, {}, True),
        ({"setting --a": "int = 2"}, {}, False),
        ({"setting --a": "float = 1"}, {}, False),
        ({}, {}, False),
        ({}, {"setting --b": (0, 2)}, False),
        ({}, {"setting --a": (0, 3)}, False),
        ({}, {"setting --a": (0, 2)}, True),
        ({"setting --a": "int = 2"}, {"setting --a": (0, 2)}, True),
    ],
)
def test_a_promise_is_broken_unless_an_earlier_minor_release_announced_it(
    found: dict[str, str], announced: dict[str, Minor], kept: bool
) -> None:
    assert (broken({"setting --a": "int = 1"}, found, announced, (0, 3)) == []) == kept


def test_surface_has_names_of_every_kind() -> None:
    found = surface()
    kinds = {name.split(" ")[0] for name in found}

    assert kinds == {
        *("connector", "entry-points", "error", "flag", "header"),
        *("metric", "python", "route", "setting", "url"),
    }
    for name in (
        *("setting --ec-store", "setting --log-format json", "setting EPD_KEY_SECRET"),
        *("flag ec-store serve --port", "flag epd up --topology", "connector timeout_s"),
        *("url redis://?ttl", "metric epd_items", "metric vllm:ec_store_hits"),
        *("metric ec_store_refused_writes", "metric ec_store_tier_hits", "header x-epd-items"),
        *("route GET /health", "error unknown_media", "entry-points ec_store.backends shm"),
        *("python ec_store.open_store(url)", "python ec_store.Store.claim(owner)"),
        *("python ec_store.EntryKey.digest", "python ec_store.arena.tier.Tier.counts"),
        *("python epd.transfer.kv.KVTransfer.eager", "python ec_store.Entry.dtype"),
    ):
        assert name in found
    assert [name for name, meaning in found.items() if " at 0x" in meaning or "  " in name] == []


@pytest.mark.parametrize("command", ["serve", "check", "up", "doctor"])
def test_flags_that_went_since_the_last_release_are_in_the_upgrade_notes(
    command: str, releases: tuple[Release, Release]
) -> None:
    this, last = (flags_of(release, command) for release in releases)
    notes = (ROOT / "docs/upgrading.md").read_text()
    gone = {flag for flag in last - this if not flag.startswith("--no-")}

    assert gone <= set(FLAG.findall(notes)), sorted(gone - set(FLAG.findall(notes)))
    for flag in gone:
        refused = called(*command.split(), flag)
        assert refused.returncode == 2
        assert flag in refused.stderr


def flags_of(release: Release, command: str) -> set[str]:
    return set(FLAG.findall(release.run("epd", *command.split(), "--help").stdout))
