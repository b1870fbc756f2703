"""`epd bench serve`: the real `vllm bench serve` on the real proxy, and the error messages."""

import asyncio
import json
import sys
import warnings
from base64 import b64decode
from collections.abc import Iterator
from functools import partial
from os import environ
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epd.__main__ import main
from epd.tools.bench import serve
from epd.tools.bench.dataset import write_dataset
from epd.tools.bench.pictures import jpeg, rng
from epd.tools.bench.replays import window_trace
from scripts.forked import SHARED_SERVER, vllm_server
from tests.support.backed import Backed, caching
from tests.support.fake_instance import FakeInstance, decodes, refuses
from tests.support.fixtures import backed, keys, launch, store, url
from tests.support.fleet import Launch
from tests.vllm_parser import needs_vllm

__all__ = ["backed", "keys", "launch", "store", "url"]

NOBODY = "http://127.0.0.1:9"


async def bench(
    *args: str | Path, env: dict[str, str] | None = None, program: str = "epd"
) -> tuple[int | None, str, str]:
    """Return exit code, stdout and stderr of `epd bench serve`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, "bench", "serve", *map(str, args)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
def forked_vllm() -> Iterator[None]:
    """Have benchmarks that are started by `forked_vllm.py` fork vLLM from one process."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SHARED_SERVER, str(vllm_server()))
        yield


bench_with_vllm = partial(bench, program="tests.tools.bench.forked_vllm")


def first_pictures(instance: FakeInstance) -> list[str]:
    """Return the `uuid` of each request's picture, in order, without the warm-up requests."""
    return [
        part["uuid"]
        for call in instance.calls
        for part in call.parts
        if part["type"] != "text" and call.body.get("max_completion_tokens") == 3
    ]


@pytest.mark.full
@needs_vllm
@pytest.mark.e2e
@pytest.mark.usefixtures("forked_vllm")
async def test_vllms_benchmark_sends_the_replay_and_each_picture_is_encoded_once(
    launch: Launch, backed: Backed, url: str, models: Path, tmp_path: Path
) -> None:
    plain = FakeInstance(decodes)
    async with caching(launch, backed, url) as fleet, plain.running():
        code, out, err = await bench_with_vllm(
            *("--url", f"epd={fleet.url}", "--url", f"plain={plain.url}"),
            *("--tokenizer", models / "tiny-qwen2.5-vl", "--dataset", "window"),
            *("--num-prompts", "15", "--max-concurrency", "1", "--output-len", "3"),
            *("--out", tmp_path / "out.json"),
        )

        assert code == 0, err
        trace = window_trace(rng(0, "window"), 15)
        sent = first_pictures(fleet.d)
        assert [sent.index(uuid) for uuid in sent] == [trace.index(one) for one in trace]
    through, beside = json.loads((tmp_path / "out.json").read_bytes())["runs"]
    assert (through["name"], beside["name"]) == ("epd", "plain")
    assert (through["prompts"], through["distinct_pictures"]) == (15, 3)
    assert (through["completed"], through["failed"]) == (15, 0)
    assert through["hit_rate"] == through["ideal_hit_rate"] == 12 / 15
    assert through["encodes_per_distinct_picture"] == 1
    assert through["ttft_ms"]["p99"] >= through["ttft_ms"]["p50"] > 0
    assert beside["completed"] == 15
    assert beside["hit_rate"] is None
    assert "/metrics: 404" in beside["notes"][0]
    assert "Mean TTFT (ms)" in out
    assert "epd, window: 3 pictures in 15 requests" in out


@pytest.mark.full
@needs_vllm
@pytest.mark.e2e
@pytest.mark.usefixtures("forked_vllm")
async def test_a_fleet_that_answers_nothing_is_an_error_with_its_reason(
    launch: Launch, backed: Backed, url: str, models: Path, tmp_path: Path
) -> None:
    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = refuses(400, "no pictures today")
        flags: list[str | Path] = [
            *("--url", fleet.url, "--tokenizer", models / "tiny-qwen2.5-vl", "--output-len", "3"),
            *("--dataset", "pool", "--num-prompts", "2"),
        ]
        code, _, err = await bench_with_vllm(*flags)

        assert code == 1
        assert "/v1/chat/completions: 400: no pictures today" in err

        code, _, err = await bench_with_vllm(*flags, "--warmups", "0")

        assert code == 1
        assert "no request was answered: Bad Request" in err


@pytest.mark.full
@needs_vllm
@pytest.mark.e2e
@pytest.mark.usefixtures("forked_vllm")
async def test_an_error_of_vllms_benchmark_is_shown(launch: Launch, tmp_path: Path) -> None:
    async with launch() as fleet:
        code, out, err = await bench_with_vllm(
            *("--url", fleet.url, "--tokenizer", tmp_path / "no-tokenizer", "--num-prompts", "1"),
            *("--dataset", "local"),
        )

    assert code == 1
    assert "vllm bench serve ended with code" in err
    assert "no-tokenizer" in out


def test_a_longer_data_set_begins_like_a_shorter_one_of_its_seed(tmp_path: Path) -> None:
    made = [
        Path(write_dataset(tmp_path, "window", prompts, seed).path).read_bytes()
        for prompts, seed in ((4, 1), (6, 1), (4, 2))
    ]

    assert made[1].startswith(made[0])
    assert made[2] != made[0]
    rows = [json.loads(line) for line in made[1].splitlines()]
    numbers = window_trace(rng(1, "window"), 6)
    pictures = [row["image_files"] for row in rows]
    assert [pictures.index(one) for one in pictures] == [numbers.index(one) for one in numbers]


@needs_vllm
def test_vllm_sends_a_picture_as_it_is(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        from vllm.benchmarks.datasets import CustomImageDataset  # noqa: PLC0415 - needs vLLM

    made = write_dataset(tmp_path, "local", 1, seed=1)
    sample = CustomImageDataset(dataset_path=made.path, disable_shuffle=True).sample(None, 1)
    kind, _, content = sample[0].multi_modal_data["image_url"]["url"].partition(",")

    assert kind == "data:image/jpeg;base64"
    assert b64decode(content) == jpeg(rng(1, "local", "picture", 0))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: --url"),
        (["--url", "localhost"], "'localhost' is not [NAME=]http://HOST:PORT"),
        (["--url", NOBODY, "--dataset", "mnist"], "invalid choice: 'mnist'"),
    ],
)
def test_wrong_flags_end_in_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *args])
    err = capsys.readouterr().err

    assert ended.value.code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@needs_vllm
@pytest.mark.e2e
class TestBeforeItBegins:
    """Checks of the target before the benchmark starts."""

    @pytest.fixture
    def flags(self) -> list[str | Path]:
        return ["--dataset", "pool", "--num-prompts", "1"]

    async def test_a_file_that_cannot_be_written(
        self, flags: list[str | Path], tmp_path: Path
    ) -> None:
        code, _, err = await bench("--url", NOBODY, *flags, "--out", tmp_path / "no" / "out.json")

        assert code == 1
        assert "No such file or directory" in err
        assert "cannot be reached" not in err

    async def test_a_target_without_a_server(self, flags: list[str | Path]) -> None:
        code, _, err = await bench("--url", NOBODY, *flags)

        assert code == 1
        assert f"{NOBODY}/v1/models cannot be reached" in err

    async def test_a_model_that_the_target_does_not_have(
        self, launch: Launch, flags: list[str | Path]
    ) -> None:
        async with launch() as fleet:
            code, _, err = await bench("--url", fleet.url, "--model", "other", *flags)

        assert code == 1
        assert "no model 'other'; its models: m" in err

    async def test_bench_serve_reports_a_missing_key(
        self, launch: Launch, keys: Path, flags: list[str | Path]
    ) -> None:
        async with launch(api_keys_file=keys) as fleet:
            code, _, err = await bench("--url", fleet.url, *flags)

        assert code == 1
        assert "/v1/models: 401" in err

    async def test_an_invalid_json_option_is_rejected(self, flags: list[str | Path]) -> None:
        async def page(_: web.Request) -> web.Response:
            return web.Response(text="<html>")

        app = web.Application()
        app.router.add_get("/v1/models", page)
        async with TestServer(app) as server:
            code, _, err = await bench("--url", f"http://127.0.0.1:{server.port}", *flags)

        assert code == 1
        assert "its answer is not JSON" in err


def test_servers_are_asked_before_data_sets_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(serve, "find_spec", lambda _name: True)
    monkeypatch.setattr(serve, "write_dataset", lambda *of: made.append(of))

    with pytest.raises(SystemExit, match="cannot be reached"):
        main(["bench", "serve", "--url", NOBODY])

    assert made == []


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match=r"needs vllm: pip install 'epd-proxy\[vllm\]'"):
        main(["bench", "serve", "--url", NOBODY])
