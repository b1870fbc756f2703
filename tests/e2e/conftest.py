"""Real vLLM engines on the CPU behind the real proxy; each stack is started once.

Tests that ask for `stack` run on every stack; those that need one of them say which: `@on(...)`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from xdist.scheduler import LoadScopeScheduling

from ec_store import EntryInfo, open_store
from epd.routing.instances import Role
from epd.tools.fleet.engine import Engine
from epd.tools.fleet.settings import Topology
from epd.tools.fleet.stack import Stack
from scripts.forked import ForkedStack
from tests.collector import Collector, over_http
from tests.e2e.stacks import AUDIO_STACKS, CLUSTER, REDIS, STACKS, VISION_STACKS, Spec
from tests.models import written
from tests.store.redis_server import RedisServer, cluster

ROOT = Path(__file__).resolve().parents[2]
MEDIA = ROOT / "examples" / "media"


@dataclass
class Served:
    """A running stack, with a client of its proxy and one of its decode engine alone."""

    stack: Stack
    redis: Sequence[RedisServer]
    spec: Spec
    client: openai.OpenAI
    baseline: openai.OpenAI
    collector: Collector
    logs: Path

    @property
    def model(self) -> str:
        """The model's served name."""
        return self.spec.model

    @property
    def encode(self) -> Engine:
        return self.stack.of(Role.ENCODE)[0]

    def log(self, engine: Engine) -> str:
        """What an engine has logged."""
        return (self.logs / f"{engine.name}.log").read_text()

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


class WholeStacks(LoadScopeScheduling):  # type: ignore[misc]  # of no known type
    """Gives each of several test processes all tests of a stack, so that it is started once."""

    def _split_scope(self, nodeid: str) -> str:
        named = [name for name in map(str, STACKS) if name in nodeid]
        return max(named, key=len, default=nodeid)  # one's name may begin another's


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeStacks:
    return WholeStacks(config, log)


@contextmanager
def redis_servers(store: str, folder: Path) -> Iterator[tuple[Sequence[RedisServer], str | None]]:
    """The servers that a kind of store needs, and its URL where it needs any."""
    folder.mkdir()
    with ExitStack() as stack:
        if store == REDIS:
            server = stack.enter_context(RedisServer(folder))
            yield [server], server.url()
        elif store == CLUSTER:
            servers = stack.enter_context(cluster(folder))
            yield servers, f"redis+cluster://127.0.0.1:{servers[0].port}"
        else:
            yield [], None


@pytest.fixture(scope="session", params=VISION_STACKS + AUDIO_STACKS, ids=str)
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    spec: Spec = request.param
    directory = tmp_path_factory.mktemp(str(spec))
    with ExitStack() as running:
        collector = running.enter_context(over_http())
        traces = ["--otlp-traces-endpoint", collector.url] if spec.traced else []
        redis, url = running.enter_context(redis_servers(spec.store, directory / "redis"))
        described = (Stack if spec.programs else ForkedStack)(
            written(spec.model) / spec.model,
            Topology.parse(spec.topology),
            directory,
            local_media=MEDIA,
            store=url,
            kv_extra=spec.kv_extra(),
            flags={role: [*flags, *traces] for role, flags in spec.flags().items()},
            # What is found does not depend on how busy the machine is.
            proxy_flags=["--ec-store-budget-s", "2", "--trust-request-mm-kwargs", *traces],
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
            environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            running.enter_context(described)
        answers = {Role.DECODE, Role.PREFILL_DECODE}
        decode = next(engine for engine in described.engines if engine.role in answers)
        client, baseline = (
            running.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
            )
            for server in (described, decode)
        )
        yield Served(described, redis, spec, client, baseline, collector, directory / "logs")
        described.check_alive()


def metric(engine: Engine, name: str) -> float:
    """A figure of an engine's own `/metrics`, summed over its labels."""
    page = httpx.get(f"{engine.url}/metrics", timeout=60).text
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert samples, f"{engine.name} has no metric {name}"
    return sum(sample.value for sample in samples)


def stored(stack: Served) -> dict[str, EntryInfo]:
    """What the stack's store holds, by identifier."""
    with open_store(stack.stack.store) as store:
        return {row.info.key.identifier: row.info for row in store.ls() if row.info is not None}
