"""Real vLLM engines on the CPU behind the real proxy; each stack is started once.

Tests that ask for `stack` run on every stack; those that need one of them say which:
`@pytest.mark.parametrize("stack", [...], indirect=True)`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ec_store import EntryInfo, open_store
from epd.fleet import Engine, Stack, Topology
from epd.instances import Role
from tests.store.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
MEDIA = ROOT / "examples" / "media"

VISION, AUDIO = "tiny-qwen2.5-vl", "tiny-qwen2-audio"
E_PD, E_P_D = "1e1pd", "1e1p1d"
DISK, REDIS = "file", "redis"
ON_DISK = (VISION, E_PD, DISK)
ON_REDIS = (VISION, E_PD, REDIS)
VISION_STACKS = [ON_DISK, (VISION, E_P_D, DISK), ON_REDIS]
AUDIO_STACKS = [(AUDIO, E_PD, DISK), (AUDIO, E_P_D, DISK)]


@dataclass
class Served:
    """A running stack, with a client of its proxy and one of its decode engine alone."""

    stack: Stack
    redis: RedisServer | None
    model: str
    topology: str
    client: openai.OpenAI
    baseline: openai.OpenAI

    @property
    def encode(self) -> Engine:
        return self.stack.of(Role.ENCODE)[0]

    @property
    def consumers(self) -> list[Engine]:
        """The engines that must not encode: all but the encode engine."""
        return [engine for engine in self.stack.engines if engine.role is not Role.ENCODE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")
            if find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip("vLLM is not installed: scripts/test.sh does it"))


@pytest.fixture(
    scope="session",
    params=VISION_STACKS + AUDIO_STACKS,
    ids="-".join,
)
def stack(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, topology, store = request.param
    directory = tmp_path_factory.mktemp(f"{model}-{topology}")
    redis = RedisServer(directory / "redis") if store == REDIS else None
    described = Stack(
        models / model,
        Topology.parse(topology),
        directory,
        local_media=MEDIA,
        store=redis.url() if redis else None,
    )
    decode = next(
        engine for engine in described.engines if engine.role in {Role.DECODE, Role.PREFILL_DECODE}
    )
    with (
        redis or nullcontext(),
        described,
        openai.OpenAI(base_url=f"{described.url}/v1", api_key="k", max_retries=0) as client,
        openai.OpenAI(base_url=f"{decode.url}/v1", api_key="k", max_retries=0) as baseline,
    ):
        yield Served(described, redis, model, topology, client, baseline)
        described.check_alive()


def metric(engine: Engine, name: str) -> float:
    """A figure of an engine's own `/metrics`, summed over its labels."""
    page = httpx.get(f"{engine.url}/metrics", timeout=10).text
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert samples, f"{engine.name} has no metric {name}"
    return sum(sample.value for sample in samples)


def stored(stack: Served) -> dict[str, EntryInfo]:
    """What the stack's store holds, by identifier."""
    with open_store(stack.stack.store) as store:
        return {row.info.key.identifier: row.info for row in store.ls() if row.info is not None}
