"""Background work that raises: it is logged, counted and restarted."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from epd.aio import Background
from epd.config import ProxyConfig
from epd.discovery.membership import membership
from epd.discovery.polling import poll_instances, poll_metrics, probe_periodically
from epd.edge.listening import Handshakes
from epd.edge.protocol import EdgeServer
from epd.errors import UpstreamUnreachable
from epd.routing.health import HealthState
from epd.routing.instances import Instance, Role
from epd.routing.registry import Registry
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable
from epd.upstream import Upstream
from tests.support.fake_instance import FakeInstance, decodes
from tests.support.fleet import Launch, until
from tests.support.raw import connected, ended

pytestmark = pytest.mark.fault(73)

FAST: dict[str, Any] = {
    "encode_servers_urls": ("http://e:1",),
    "probe_interval_s": 0.05,
    "load_interval_s": 0.05,
    "decode_balance": "least_load",
}
UNPARSABLE = "http://a\\b:80"
"""URL that the HTTP client and `base_url` reject."""


class Counted(Background):
    """Background work that counts its exceptions by task, and restarts after milliseconds."""

    def __init__(self) -> None:
        self.failures = Counter[str]()
        super().__init__(self._add, first_delay_s=0.001, max_delay_s=0.5)

    def _add(self, task: str, count: int) -> None:
        self.failures[task] += count


@pytest.fixture
def counted() -> Counted:
    return Counted()


async def test_work_that_raises_once_is_logged_counted_and_restarted(counted: Counted) -> None:
    starts: list[int] = []

    async def raises_once() -> None:
        starts.append(len(starts))
        if len(starts) == 1:
            raise LookupError("nothing there")
        await asyncio.Event().wait()

    with capture_logs() as lines:
        async with counted.run_task("work", raises_once):
            await until(lambda: len(starts) == 2)
            assert counted.failures == {"work": 1}

    [line] = lines
    assert (line["event"], line["task"]) == ("background task failed", "work")
    assert line["log_level"] == "error"
    assert isinstance(line["exc_info"], LookupError)
    assert len(starts) == 2


async def test_work_that_keeps_raising_is_restarted_with_growing_delays(counted: Counted) -> None:
    async def raises() -> None:
        raise LookupError

    with capture_logs() as lines:
        async with counted.run_task("work", raises):
            await until(lambda: counted.failures["work"] >= 11)

    delays = [line["restart_in_s"] for line in lines]
    assert delays[:4] == [0.001, 0.002, 0.004, 0.008]
    assert delays[8:11] == [0.256, 0.5, 0.5]


async def test_work_that_has_run_for_long_begins_again_with_the_first_delay(
    counted: Counted,
) -> None:
    runs_s = iter([0, 0, 0.5])

    async def raises() -> None:
        await asyncio.sleep(next(runs_s))
        raise LookupError

    with capture_logs() as lines:
        async with counted.run_task("work", raises):
            await until(lambda: counted.failures["work"] >= 3)

    assert [line["restart_in_s"] for line in lines][:3] == [0.001, 0.002, 0.001]


async def test_work_that_returns_is_not_started_again(counted: Counted) -> None:
    starts = []

    async def returns() -> None:
        starts.append(1)

    await counted.keep_running("work", returns)
    assert (len(starts), counted.failures) == (1, {"work": 0})


class Unexpected(Upstream):
    """Upstream that raises an unexpected exception for some hosts."""

    def open(self, url: str, **about: Any) -> Any:
        if "raises" in url:
            raise LookupError(url)
        return super().open(url, **about)

    async def probe(self, url: str, *, timeout_s: float) -> bool:
        if "raises" in url:
            raise LookupError(url)
        return await super().probe(url, timeout_s=timeout_s)


@pytest.mark.parametrize("bad", [UNPARSABLE, "http://raises"])
async def test_an_error_in_one_poll_stops_no_other_probes(bad: str, counted: Counted) -> None:
    one, two = FakeInstance(decodes), FakeInstance(decodes)
    async with one.running(), two.running(), Unexpected.connect() as upstream:
        config = ProxyConfig(decode_servers_urls=(one.url, two.url), **FAST)
        [first, second, third] = (Instance(Role.DECODE, url) for url in (one.url, bad, two.url))
        table = InstanceTable([first, second, third], config.health)
        with capture_logs() as lines:
            async with (
                probe_periodically(table, upstream, config, counted),
                poll_metrics(table, StoreAccess(table), upstream, config, counted),
            ):
                await until(lambda: table.state(second) is HealthState.DOWN)
                one.healthy = False
                await until(lambda: table.state(first) is HealthState.DOWN)
                one.healthy = True
                await until(lambda: table.state(first) is not HealthState.DOWN)

        assert table.state(third) is HealthState.HEALTHY
        raised = [line for line in lines if "exc_info" in line]
        if bad == UNPARSABLE:  # handled like an unreachable host
            assert counted.failures == {"probes": 0, "reports": 0}
            assert raised == []
        else:
            assert counted.failures["probes"] > 2
            assert sorted(line["task"] for line in raised) == ["probes", "reports"]
            assert {line["instance"] for line in raised} == {bad}


async def test_each_cause_of_an_instance_is_logged_once_until_it_answers(counted: Counted) -> None:
    instances = [Instance(Role.DECODE, url) for url in ("http://a", "http://b")]
    raises: Iterator[type[Exception] | None] = iter(
        [KeyError, KeyError, ValueError, ValueError, None, ValueError]
    )
    told: list[tuple[Instance, str | None]] = []

    async def ask(instance: Instance) -> str:
        if instance is instances[0] and (kind := next(raises, None)) is not None:
            raise kind(str(len(told)))  # the message differs each time
        return "well"

    polling = poll_instances(
        "questions",
        lambda: instances,
        ask,
        lambda instance, answer: told.append((instance, answer)),
        counted,
        unexpected="raised",
        tick_s=0.001,
    )
    with capture_logs() as lines:
        async with polling:
            await until(lambda: len(told) >= 16)

    kinds = [type(line["exc_info"]).__name__ for line in lines]
    assert kinds == ["KeyError", "ValueError", "ValueError"]
    assert counted.failures == {"questions": 5}
    of_first = [answer for instance, answer in told if instance is instances[0]]
    assert of_first[:7] == ["raised"] * 4 + ["well", "raised", "well"]
    assert {answer for instance, answer in told[:16] if instance is instances[1]} == {"well"}


async def test_instances_are_polled_again_after_a_callback_raised(
    counted: Counted,
) -> None:
    """The table does not hand out an instance again before it has an answer."""
    instances = [Instance(Role.DECODE, url) for url in ("http://a", "http://b")]
    due, told = set(instances), list[tuple[str, object]]()
    hung = asyncio.Event()

    def give_out() -> list[Instance]:
        given = sorted(due, key=lambda one: one.url)
        due.clear()
        return given

    async def ask(instance: Instance) -> str:
        if instance is instances[0] and not told:
            await hung.wait()
        return "well"

    def tell(instance: Instance, answer: str | None) -> None:
        due.add(instance)
        told.append((instance.url, answer))
        if len(told) == 1:
            raise LookupError

    polling = poll_instances(
        "questions", give_out, ask, tell, counted, unexpected="raised", tick_s=0.001
    )
    with capture_logs():
        async with polling:
            await until(lambda: ("http://a", "well") in told)

    assert told[:2] == [("http://b", "well"), ("http://a", None)]
    assert counted.failures == {"questions": 1}


async def test_a_source_of_instances_that_raises_once_is_followed_again(
    tmp_path: Path, counted: Counted
) -> None:
    """Callbacks of a change may raise."""
    file, changes = tmp_path / "instances.yaml", list[Instance]()
    file.write_text("instances: [{role: encode, url: 'http://e:1'}]")

    def changed(instance: Instance, *_: object) -> None:
        changes.append(instance)
        if len(changes) in {1, 3}:
            raise LookupError

    config = ProxyConfig(instances_file=file, decode_servers_urls=("http://d:1",))
    table = InstanceTable()
    registry = Registry(table, config.instances, on_change=changed)
    with capture_logs() as lines:
        async with (
            Upstream.connect() as upstream,
            membership(config, registry, upstream, counted),
        ):
            await until(lambda: table.has(Role.ENCODE))
            file.write_text("instances: [{role: encode, url: 'http://e:2'}]")
            await until(lambda: [one.url for one in table.of_roles(Role.ENCODE)] == ["http://e:2"])

    assert counted.failures["membership"] >= 1
    assert {line["task"] for line in lines if "exc_info" in line} == {"membership"}


class RoomOnceUnknown:
    """Server that raises when it is first asked for room, and then has none."""

    asked = 0

    def has_room(self, _: int) -> bool:
        self.asked += 1
        if self.asked == 1:
            raise LookupError
        return False


async def test_tls_connections_are_accepted_after_one_that_raised(counted: Counted) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server, config = RoomOnceUnknown(), ProxyConfig(**FAST, decode_servers_urls=("http://d:1",))
    with capture_logs() as lines:
        accepting = Handshakes(cast("EdgeServer", server), listener, tls, config, counted)
        async with connected(f"http://127.0.0.1:{listener.getsockname()[1]}"):
            await until(lambda: counted.failures["tls_accept"] == 1)
            async with connected(f"http://127.0.0.1:{listener.getsockname()[1]}") as (reader, _):
                assert await ended(reader)  # accepted, and closed since there is no room
        accepting.close()
        await until(lambda: listener.fileno() == -1)

    assert server.asked == 2
    assert [line["task"] for line in lines] == ["tls_accept"]


async def test_a_url_that_no_request_can_be_sent_to_is_an_instance_that_cannot_be_reached() -> None:
    async with Upstream.connect() as upstream:
        assert not await upstream.probe(UNPARSABLE, timeout_s=5)
        with pytest.raises(UpstreamUnreachable, match="URL of the decode instance") as raised:
            await upstream.open(UNPARSABLE, stage="decode", headers={}, head_timeout_s=5)
        with pytest.raises(UpstreamUnreachable):
            await upstream.fetch(UNPARSABLE, stage="encode", headers={}, timeout_s=5)

    assert raised.value.slug == "decode_failed"


async def test_metrics_have_every_task_from_its_beginning() -> None:
    async with (
        Launch()(load_interval_s=1) as fleet,
        fleet.http.get(f"{fleet.url}/metrics") as reply,
    ):
        page = await reply.text()

    for task in ("loop_lag", "probes", "reports"):
        assert f'\nepd_background_failures_total{{task="{task}"}} 0.0\n' in page
