"""Stores of the last release in this one, and the reverse: entries, claims, refusals."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from ec_store import Entry
from ec_store.testing.stores import entries
from tests.compat.releases import Refused, Release, StoreProcess
from tests.examples import scaled
from tests.support.redis_server import RedisServer

Pair = tuple[Release, Release]

KEY = ["qwen2_5_vl@0:580b", "cat"]
ENTRY = {
    "data": bytes(range(16)).hex(),
    "dtype": "F32",
    "shape": [1, 4],
    "modality": "image",
    "metadata": {"image_grid_thw": [1, 8, 8]},
}

FOLDER_REFUSED = (
    "the store has format version {theirs}, and this release reads version {mine}: "
    "delete it, or use another directory for this release"
)
MEMORY_REFUSED = (
    "the server of the arena speaks version {theirs} of its protocol, this client version {mine}: "
    "run one release of ec_store in both"
)


@pytest.fixture(params=["last first", "this first"])
def pair(request: pytest.FixtureRequest, releases: Pair) -> Pair:
    """Return both releases in either order: the first has the store, the second uses it."""
    this, last = releases
    return (last, this) if request.param == "last first" else (this, last)


def as_json(entry: Entry) -> dict[str, Any]:
    return {
        "data": bytes(entry.data).hex(),
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "modality": entry.modality,
        "metadata": dict(entry.metadata),
    }


def test_processes_are_of_different_releases(releases: Pair) -> None:
    this, last = releases
    code = "import ec_store, epd; print(ec_store.__file__, epd.__file__)"
    found = []
    for release in (this, last):
        with release.process("-c", code) as process:
            assert process.stdout is not None
            found.append(process.stdout.read().split())

    assert found == [
        [f"{release.root}/ec_store/__init__.py", f"{release.root}/epd/__init__.py"]
        for release in (this, last)
    ]


def test_entries_in_redis_are_equal_bytes_and_read_by_the_other_release(
    releases: Pair, redis: RedisServer
) -> None:
    urls = [redis.url(f"prefix={release.name}") for release in releases]
    with ExitStack() as stack:
        writers, readers = (
            [stack.enter_context(one.store(url)) for one, url in zip(users, urls, strict=True)]
            for users in (releases, releases[::-1])
        )

        @settings(max_examples=scaled(60))
        @given(entries())
        def equal(entry: Entry) -> None:
            redis.command("FLUSHALL")
            for writer, reader in zip(writers, readers, strict=True):
                assert writer.call("put", KEY, as_json(entry))
                assert reader.call("get", KEY) == as_json(entry)
                assert reader.call("get", [KEY[0], "dog"]) is None
            written, other = (blob_of(redis, release.name) for release in releases)
            assert written == other

        equal()


def blob_of(redis: RedisServer, prefix: str) -> bytes:
    """Return the only entry of a store, without the random bytes of its write."""
    [name] = redis.command("KEYS", f"{prefix}:*:e2")
    blob: bytes = redis.command("GET", name)[16:]
    return blob


def test_claims_leases_and_namespaces_in_redis_hold_for_the_other_release(
    pair: Pair, redis: RedisServer
) -> None:
    first, second = pair
    with first.store(redis.url()) as one, second.store(redis.url()) as other:
        one.call("register_namespace", "m", KEY[0])
        assert other.call("namespaces") == {"m": KEY[0]}

        assert one.call("claim", KEY, "one", 60)
        assert not other.call("claim", KEY, "other", 60)
        one.call("release", KEY, "one")
        assert other.call("claim", KEY, "other", 60)

        assert not other.call("lease", KEY, 60)
        one.call("put", KEY, ENTRY)
        assert other.call("lease", KEY, 60)


def check_shared(store: StoreProcess, other: StoreProcess, *, shared: bool, refusal: str) -> None:
    """Check that the other release reads an entry of the first, or is refused with the reason."""
    assert store.call("put", KEY, ENTRY)
    if shared:
        assert other.call("get", KEY) == ENTRY
    else:
        with pytest.raises(Refused) as refused:
            other.call("get", KEY)
        assert refusal in str(refused.value)
    assert store.call("get", KEY) == ENTRY


def test_a_directory_is_shared_or_refused_by_its_format(pair: Pair, tmp_path: Path) -> None:
    owner, guest = pair
    url = f"file://{tmp_path}/store"
    theirs, mine = (release.value("ec_store.disk.config", "FORMAT") for release in pair)

    refusal = FOLDER_REFUSED.format(theirs=theirs, mine=mine)

    with owner.store(url) as store, guest.store(url) as other:
        check_shared(store, other, shared=theirs == mine, refusal=refusal)
    check_commands(guest, url, shared=theirs == mine, message="format version")


def test_memory_of_a_host_is_shared_or_refused_by_its_protocol(pair: Pair, tmp_path: Path) -> None:
    owner, guest = pair
    theirs, mine = (release.value("ec_store.arena.protocol", "VERSION") for release in pair)

    with (
        owner.memory(tmp_path / "arena.sock") as url,
        owner.store(url) as store,
        guest.store(url) as other,
    ):
        refusal = MEMORY_REFUSED.format(theirs=theirs, mine=mine)
        check_shared(store, other, shared=theirs == mine, refusal=refusal)
        check_commands(guest, url, shared=theirs == mine, message="run one release")


def test_commands_of_either_release_work_on_entries_of_the_other(
    pair: Pair, redis: RedisServer
) -> None:
    owner, guest = pair
    with owner.store(redis.url()) as store:
        assert store.call("put", KEY, ENTRY)

    check_commands(guest, redis.url(), shared=True)


def check_commands(release: Release, url: str, *, shared: bool, message: str = "") -> None:
    """Run the commands of `ec-store` on a store with one entry; `purge` deletes it."""
    commands = (["stat"], ["ls"], ["verify"], ["gc"], ["purge", "--namespace", KEY[0]], ["ls"])
    for number, (command, *flags) in enumerate(commands):
        ended = release.run("ec_store", command, *flags, url)
        if shared or "its server evicts by itself" in ended.stdout:
            assert ended.returncode == 0, (command, ended.stderr)
            assert command != "ls" or ("cat" in ended.stdout) == (number == 1)
        else:
            assert ended.returncode == 1, (command, ended)
            assert message in ended.stderr, (command, ended.stderr)
            assert len(ended.stderr.splitlines()) == 1
