"""`--instances-file`: the proxy watches the file and keeps the latest valid content."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, Launch, until
from tests.support.programs import run


def written(urls: Iterable[str]) -> str:
    rows = [f"  - {{role: encode, url: '{url}'}}" for url in urls]
    return "\n".join(["instances:", *rows]) if rows else "instances: []"


@asynccontextmanager
async def watching(launch: Launch, path: Path) -> AsyncIterator[Fleet]:
    async with launch(encode=0, instances_file=path) as fleet:
        yield fleet


async def encoders(fleet: Fleet) -> list[str]:
    async with fleet.http.get(f"{fleet.url}/instances") as reply:
        page = await reply.json()
        return sorted([*page["encode"]["live"], *page["encode"]["evicted"]])


async def sees(fleet: Fleet, urls: list[str]) -> None:
    async with asyncio.timeout(20):
        while await encoders(fleet) != urls:  # noqa: ASYNC110 - the proxy sets no event
            await asyncio.sleep(0.05)


async def test_a_valid_file_is_applied_and_an_invalid_one_changes_nothing(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text(written(["http://a:1"]))
    async with watching(launch, path) as fleet:
        assert await encoders(fleet) == ["http://a:1"]
        path.write_text(written(["http://a:1", "http://b:1"]))
        await sees(fleet, ["http://a:1", "http://b:1"])
        path.write_text("instances: [{role: encode, url: 'nothing'}]")
        await until(lambda: "'nothing' is not a URL" in capfd.readouterr().out)
        assert await encoders(fleet) == ["http://a:1", "http://b:1"]
        path.unlink()
        await asyncio.sleep(0.7)
        assert await encoders(fleet) == ["http://a:1", "http://b:1"]
        path.write_text(json.dumps({"instances": [{"role": "encode", "url": "http://c:1"}]}))
        await sees(fleet, ["http://c:1"])
        path.write_text(written([]))
        await sees(fleet, [])


async def test_a_swapped_config_map_link_is_followed(launch: Launch, tmp_path: Path) -> None:
    for version, url in {"v1": "http://a:1", "v2": "http://b:1"}.items():
        (tmp_path / version).mkdir()
        (tmp_path / version / "instances.yaml").write_text(written([url]))
    (tmp_path / "..data").symlink_to("v1")
    path = tmp_path / "instances.yaml"
    path.symlink_to("..data/instances.yaml")
    async with watching(launch, path) as fleet:
        assert await encoders(fleet) == ["http://a:1"]
        (tmp_path / "new").symlink_to("v2")
        (tmp_path / "new").rename(tmp_path / "..data")
        await sees(fleet, ["http://b:1"])


def test_an_invalid_file_at_the_start_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    flags = ["--instances-file", str(path)]
    missing = run("serve", *flags)
    path.write_text("instances: [{role: chef, url: 'http://e:1'}]")
    wrong = run("serve", *flags)

    assert (missing.returncode, wrong.returncode) == (2, 2)
    assert "No such file" in missing.stderr
    assert "instances.0.role" in wrong.stderr
    assert missing.stderr.count("\n") == wrong.stderr.count("\n") == 1
