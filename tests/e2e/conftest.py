"""Real vLLM engines on the CPU behind the real proxy; each stack is started once.

`tests/e2e/stacks.py` has the table of which tests run on which stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from xdist.scheduler import LoadScopeScheduling

from epd.routing.instances import CONSUMERS, Role
from epd.tools.up.topology import Topology
from scripts.forked import ForkedStack
from tests.collector import over_http
from tests.e2e.adapters import ADAPTER, write_adapter, write_template
from tests.e2e.served import Served
from tests.e2e.stacks import CLUSTER, MEMORY, MODELS, REDIS, STACKS, Spec, stacks_of
from tests.ec_store.arena.served import MIB, Serve
from tests.models import written
from tests.paths import MEDIA
from tests.support.redis_server import RedisServer, cluster
from tests.vllm_parser import needs_vllm


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `stack` on the stacks that the table lists for it."""
    if "stack" in metafunc.fixturenames:
        stacks = stacks_of(metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__)
        metafunc.parametrize("stack", stacks, indirect=True, ids=str, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")
            item.add_marker("full")
            item.add_marker(needs_vllm)


class WholeStacks(LoadScopeScheduling):  # type: ignore[misc]  # the base class is untyped
    """Scheduler that gives all tests of a stack to one test process, so that it is started once."""

    def _split_scope(self, nodeid: str) -> str:
        named = [name for name in map(str, STACKS) if name in nodeid]
        return max(named, key=len, default=nodeid)  # one stack's name may be a prefix of another's


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeStacks:
    return WholeStacks(config, log)


Servers = tuple[Sequence[RedisServer], Serve | None, str | None]
"""Servers of Redis, the server of a memory, and the store's URL."""


@contextmanager
def store_servers(store: str, folder: Path) -> Iterator[Servers]:
    """Start the servers of a kind of store."""
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        if store == REDIS:
            server = stack.enter_context(RedisServer(folder))
            yield [server], None, server.url()
        elif store == CLUSTER:
            servers = stack.enter_context(cluster(folder))
            yield servers, None, f"redis+cluster://127.0.0.1:{servers[0].port}"
        elif store == MEMORY:
            memory = Serve(folder / "arena.sock", max_bytes=64 * MIB)
            memory.start()
            stack.callback(memory.kill)
            yield [], memory, f"shm://{folder}/arena.sock"
        else:
            yield [], None, None


def adapted_flags(model: Path, folder: Path) -> Mapping[Role, Sequence[str]]:
    """Return the flags of engines with an adapter, at consumers, and a strict chat template."""
    folder.mkdir(exist_ok=True)
    template = ["--chat-template", str(write_template(model, folder / "strict.jinja"))]
    adapter = write_adapter(model, folder / "adapter")
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"]
    return {role: template + lora * (role in CONSUMERS) for role in Role}


@pytest.fixture(scope="session")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    spec: Spec = request.param
    directory = tmp_path_factory.mktemp(str(spec))
    with ExitStack() as running:
        collector = running.enter_context(over_http())
        traces = ["--otlp-traces-endpoint", collector.url] if spec.traced else []
        model = written(*MODELS) / spec.model
        adapted = adapted_flags(model, directory) if spec.adapted else {}
        redis, memory, url = running.enter_context(store_servers(spec.store, directory / "store"))
        described = ForkedStack(
            model,
            Topology.parse(spec.topology),
            directory,
            local_media=MEDIA,
            store=url,
            kv_extra=spec.kv_extra(),
            ec_both=spec.saving,
            kv_events=spec.follows,
            flags={
                role: [*flags, *traces, *adapted.get(role, [])]
                for role, flags in spec.flags().items()
            },
            # No result depends on the speed of the machine.
            proxy_flags=[
                "--ec-store-budget-s",
                "2",
                "--trust-request-mm-kwargs",
                *traces,
                *spec.proxy_flags(),
            ],
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
            environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            running.enter_context(described)
        answers = {Role.DECODE, Role.PREFILL_DECODE}
        decode = next(engine for engine in described.all_engines if engine.role in answers)
        client, baseline = (
            running.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
            )
            for server in (described, decode)
        )
        yield Served(
            described, redis, memory, spec, client, baseline, collector, directory / "logs"
        )
        described.check_alive()
