"""`epd doctor` with fake instances and a real store."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ec_store import open_store
from epd.config import ProxyConfig
from epd.discovery.entries import write_json
from epd.discovery.redis_store import RegistrationsInRedis
from epd.routing.instances import Instance, Role
from epd.tools.doctor import trials
from epd.tools.doctor.examination import examine
from epd.tools.doctor.findings import Finding, Verdict
from epd.tools.doctor.instances import headers_of
from epd.tools.doctor.trials import Limits
from tests.discovery.name_server import NameServer
from tests.support.backed import Backed
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    decodes,
    encodes,
    encodes_without_params,
    hangs,
    page,
    prefills,
    refuses,
)
from tests.support.fake_turns import Turns, says
from tests.support.fleet import until
from tests.support.kv_publisher import publishers
from tests.support.redis_server import RedisServer
from tests.support.strict_encode import Memory, Pushes
from tests.support.strict_instance import WIRES


@dataclass
class Clinic:
    """Fake instances, and the doctor's findings about them."""

    encode: FakeInstance
    prefill: FakeInstance
    decode: FakeInstance
    store: str
    backed: Backed
    limits: Limits

    async def findings(self, *, requests: bool = True, **config: Any) -> list[Finding]:
        urls = {
            "encode_servers_urls": (self.encode.url,),
            "prefill_servers_urls": (self.prefill.url,),
            "decode_servers_urls": (self.decode.url,),
            "ec_store": self.store,
            "ec_store_budget_s": 5,
            "host": "127.0.0.1",
            "media_fetch": "proxy",
            "allowed_media_domains": ("example.com",),
            "max_requests": 16,
        }
        return await examine(ProxyConfig(**urls | config), requests=requests, limits=self.limits)

    async def complaints(self, **config: Any) -> list[tuple[str, str]]:
        """Return subject and observation of each finding that is not OK."""
        found = await self.findings(**config)
        return [(one.subject, one.seen) for one in found if one.verdict is not Verdict.OK]


@pytest.fixture
async def clinic(tmp_path: Path) -> AsyncIterator[Clinic]:
    url = f"file://{tmp_path}/store?max_bytes=1MiB"
    async with AsyncExitStack() as stack:
        backed = Backed(stack.enter_context(open_store(url)), tmp_path)
        fakes = [FakeInstance(chat) for chat in (backed.encodes, prefills, backed.decodes)]
        for fake in fakes:
            await stack.enter_async_context(fake.running())
        encode, prefill, decode = fakes
        limits = Limits(read_s=0.3, counted_s=0.2, arrives_s=5.0)
        yield Clinic(encode, prefill, decode, url, backed, limits)
        await asyncio.gather(*backed.writes)


def divert(
    instance: FakeInstance, which: Callable[[dict[str, Any]], object], chat: Handler
) -> None:
    """Let an instance answer those requests in another way."""
    usual = instance.chat

    async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (chat if which(body) else usual)(request, body)

    instance.chat = answers


async def test_a_correct_fleet_has_no_findings(clinic: Clinic) -> None:
    findings = await clinic.findings()

    assert [one for one in findings if one.verdict is not Verdict.OK] == []
    seen = {one.seen for one in findings}
    assert {
        "encodes, and reports where its outputs are",
        "finds encoder outputs by their key alone",
        "hands over its KV cache",
        "answers requests that a prefill instance prefilled",
        "has the entry that an instance just wrote",
        "every instance serves m",
    } <= seen


async def test_a_fleet_without_encode_instances_is_missing_nothing(clinic: Clinic) -> None:
    assert await clinic.complaints(encode_servers_urls=(), ec_store=None) == []
    assert len(clinic.prefill.calls) == len(clinic.decode.calls) == 1


@pytest.mark.parametrize("transfer", ["mooncake", "nixl-push", "lmcache", "none"])
async def test_the_transfer_in_use_is_tried(clinic: Clinic, transfer: str) -> None:
    wire = WIRES[transfer](1, 1)
    consumes = clinic.prefill.chat
    async with AsyncExitStack() as stack:
        own = await wire.begin(stack)
        wire.settle([clinic.prefill], [clinic.decode])
        divert(clinic.prefill, lambda body: "ec_transfer_params" in body, consumes)
        findings = await clinic.findings(kv_transfer=transfer, **own)

    assert [one for one in findings if one.verdict is not Verdict.OK] == []
    assert "answers requests that a prefill instance prefilled" in {one.seen for one in findings}
    assert (wire.fetched, wire.wrong) == (1, [])


@pytest.fixture
def talking(clinic: Clinic) -> Turns:
    """Return prefill and decode instances that hold KV blocks and read each other's."""
    held = Turns()
    held.start(clinic.prefill, decode=False)
    held.start(clinic.decode, decode=True)
    for instance in (clinic.prefill, clinic.decode):
        instance.version = "0.33.0"
    return held


WITHOUT: dict[str, Any] = {"encode_servers_urls": (), "ec_store": None}


async def test_a_conversation_is_tried_and_its_second_turn_read(
    clinic: Clinic, talking: Turns
) -> None:
    findings = await clinic.findings(**WITHOUT)

    assert [one for one in findings if one.verdict is not Verdict.OK] == []
    assert "reads the blocks that decode keeps of a conversation's previous turn" in {
        one.seen for one in findings
    }
    assert len(talking.read) == 1
    assert talking.read[0] >= trials.TOKENS
    # Otherwise prefill would find the tokens in its own prefix cache.
    asked = [call.body for call in clinic.prefill.calls if call.path == "/v1/completions"]
    assert len({one["cache_salt"] for one in asked}) == len(asked) == 2
    # The second prompt must contain decode's tokens: prefill would keep wrong blocks for any
    # others.
    first, second = (one["prompt"] for one in asked)
    answer = [ord(one) for one in says({"prompt": first})]
    assert second == [*first, *answer, first[-1]]
    assert len(first) == trials.TOKENS


MAX_TOKENS = 4096

BOUNDS_S = (0.005, 0.05, 0.5, 5.0, float("inf"))


@dataclass
class Counts:
    """Transfers that a decode instance counts as vLLM does, by their tokens."""

    kb_per_token: int = 100
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        """Count a transfer at 0.5 GB/s."""
        self.tokens.append(tokens)
        self.seconds.append(tokens * self.kb_per_token / 0.5e6)

    async def page(self) -> web.Response:
        name = "vllm:nixl_xfer_time_seconds"
        lines = [
            f'{name}_bucket{{le="{bound}"}} {sum(one <= bound for one in self.seconds)}'
            for bound in BOUNDS_S
        ]
        lines += [
            f"{name}_count {len(self.seconds)}",
            f"{name}_sum {sum(self.seconds)}",
            f"vllm:nixl_bytes_transferred_sum {1000 * self.kb_per_token * sum(self.tokens)}",
            f"vllm:external_prefix_cache_hits_total {sum(self.tokens)}",
        ]
        return web.Response(text="\n".join([*lines, ""]))

    def count(self, clinic: Clinic) -> None:
        """Make the decode instance count its transfers, and both report their longest request."""
        clinic.prefill.max_model_len, clinic.decode.max_model_len = MAX_TOKENS + 1, MAX_TOKENS
        decode = clinic.decode
        decodes_it, decode.metrics = decode.chat, self.page

        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if request.path == "/v1/completions":
                self.add(len(body["prompt"]))
            return await decodes_it(request, body)

        decode.chat = chat


def of_pair(findings: list[Finding]) -> Finding:
    [finding] = [one for one in findings if one.subject.startswith("KV ")]
    return finding


@pytest.mark.fault(109)
async def test_slow_kv_transfers_of_a_pair_are_found(
    clinic: Clinic, talking: Turns, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    clinic.limits = replace(clinic.limits, dev=tmp_path)
    counts = Counts()
    counts.count(clinic)
    finding = of_pair(await clinic.findings(**WITHOUT))

    assert finding.verdict is Verdict.WARN
    assert finding.subject == f"KV {clinic.prefill.url} -> {clinic.decode.url}"
    assert finding.seen.startswith("0.5 GB/s (410 MB in 819 ms), delay 26 ms")
    assert counts.tokens[:2] == [trials.TOKENS, MAX_TOKENS - 1]


@pytest.mark.parametrize(
    ("kb_per_token", "longest", "tokens"), [(1000, MAX_TOKENS, 1000), (100, 0, trials.TOKENS)]
)
async def test_a_trial_of_kv_transfers_has_at_most_a_gigabyte_and_is_small_if_in_doubt(
    clinic: Clinic, talking: Turns, kb_per_token: int, longest: int, tokens: int
) -> None:
    counts = Counts(kb_per_token)
    counts.count(clinic)
    clinic.decode.max_model_len = longest
    await clinic.findings(**WITHOUT)

    assert counts.tokens[:2] == [trials.TOKENS, tokens]


async def test_kv_blocks_on_a_machine_without_accelerators_are_not_judged(
    clinic: Clinic, talking: Turns, tmp_path: Path
) -> None:
    clinic.limits = replace(clinic.limits, dev=tmp_path)
    Counts().count(clinic)
    finding = of_pair(await clinic.findings(**WITHOUT))

    assert finding.verdict is Verdict.OK
    assert "no verdict: the KV blocks are in the host's memory" in finding.seen


async def test_a_trial_of_kv_transfers_that_fails_is_a_warning(
    clinic: Clinic, talking: Turns
) -> None:
    Counts().count(clinic)
    long = 2 * trials.TOKENS
    refusal = refuses(500, "out of blocks")
    divert(clinic.decode, lambda body: len(body.get("prompt", "")) > long, refusal)
    finding = of_pair(await clinic.findings(**WITHOUT))

    assert finding.verdict is Verdict.WARN
    assert "the trial of KV transfers failed" in finding.seen
    assert "out of blocks" in finding.seen


async def test_an_uncounted_trial_of_kv_transfers_is_a_warning(
    clinic: Clinic, talking: Turns
) -> None:
    clinic.decode.metrics = Counts().page
    finding = of_pair(await clinic.findings(**WITHOUT))

    assert finding.verdict is Verdict.WARN
    assert "counted no transfer" in finding.seen


async def test_a_slow_decode_is_not_taken_for_a_prefill_that_reads_nothing(
    clinic: Clinic, talking: Turns
) -> None:
    computes = clinic.decode.chat

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await computes(request, body)

    clinic.decode.chat = slowly

    assert {one.verdict for one in await clinic.findings(**WITHOUT)} == {Verdict.OK}


def read_from(body: dict[str, Any]) -> dict[str, Any]:
    """Return where a prefill request reads blocks."""
    return body.get("kv_transfer_params") or {}


async def test_a_prefill_that_waits_in_vain_for_decodes_blocks_is_found(
    clinic: Clinic, talking: Turns
) -> None:
    # As an engine without `bidirectional_kv_xfer` does.
    divert(clinic.prefill, lambda body: read_from(body).get("remote_block_ids"), hangs)
    [found] = [one for one in await clinic.findings(**WITHOUT) if one.verdict is not Verdict.OK]

    assert found.verdict is Verdict.WARN
    assert found.subject == f"prefill {clinic.prefill.url}"
    assert found.seen == "conversation: no answer in 0.3 s"
    assert "bidirectional_kv_xfer" in found.advice
    await until(lambda: clinic.prefill.aborted == 1)


async def test_a_prefill_that_cannot_read_decodes_blocks_is_found(
    clinic: Clinic, talking: Turns
) -> None:
    talking.host = ""  # listens on all addresses: the doctor uses the address that answered
    refusal = refuses(500, "EngineCore")
    divert(clinic.prefill, lambda body: read_from(body).get("remote_host") == "127.0.0.1", refusal)

    [(_, seen)] = await clinic.complaints(**WITHOUT)
    assert seen == "conversation: the prefill instance answered 500"


async def test_no_second_turn_is_tried_if_decode_keeps_no_blocks(
    clinic: Clinic,
) -> None:
    findings = await clinic.findings(**WITHOUT)

    [said] = [one for one in findings if "bidirectional_kv_xfer" in one.seen]
    assert (said.verdict, said.subject) == (Verdict.OK, f"decode {clinic.decode.url}")
    assert len(clinic.prefill.calls) == len(clinic.decode.calls) == 1


async def test_a_bootstrap_server_that_does_not_answer_is_found(clinic: Clinic) -> None:
    config: Any = {"kv_transfer": "mooncake", "prefill_kv_addrs": ("127.0.0.1:9",)}
    found = [subject for subject, seen in await clinic.complaints(**config) if "prefill:" in seen]

    assert found == [f"prefill {clinic.prefill.url}"]


async def test_no_request_is_sent_where_none_may_be(clinic: Clinic) -> None:
    findings = await clinic.findings(requests=False)

    assert [one for one in findings if one.verdict is Verdict.FAIL] == []
    assert clinic.encode.calls == clinic.prefill.calls == clinic.decode.calls == []


async def test_each_consumer_is_looked_up_only_by_its_key(clinic: Clinic) -> None:
    await clinic.findings()

    [part, _] = clinic.prefill.calls[0].parts
    assert part["type"] == "image_embeds"
    assert part["uuid"] in clinic.prefill.calls[0].body["ec_transfer_params"]


async def test_an_encode_instance_without_connector_is_found(clinic: Clinic) -> None:
    clinic.encode.chat = encodes_without_params

    assert (
        f"encode {clinic.encode.url}",
        "encode: encodes, but reports no ec_transfer_params",
    ) in await clinic.complaints()


async def test_engines_that_write_to_another_store_are_found(clinic: Clinic) -> None:
    clinic.encode.chat = encodes  # does not write to the store
    clinic.prefill.chat = prefills

    assert ("store", "does not have the entry that an instance just wrote") in (
        await clinic.complaints()
    )


async def test_a_full_store_leaves_consumers_untried(clinic: Clinic) -> None:
    clinic.encode.chat = encodes  # its entry is dropped
    clinic.limits = replace(clinic.limits, arrives_s=0.0, full_bytes=2**62)
    (store, full), (consumer, untried) = await clinic.complaints()

    assert (store, consumer) == ("store", f"prefill {clinic.prefill.url}")
    assert "its file system is full" in full
    assert "it is not known whether it finds encoder outputs" in untried


async def test_an_engine_that_writes_under_another_namespace_than_it_reports_is_found(
    clinic: Clinic,
) -> None:
    encodes = clinic.encode.chat
    clinic.limits = replace(clinic.limits, arrives_s=0.0)

    async def reports_another(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = await encodes(request, body)
        said = json.loads(cast("web.Response", reply).text or "")
        for entry in said["ec_transfer_params"].values():
            entry["namespace"] = "reported"
        await asyncio.gather(*clinic.backed.writes)  # the doctor looks for the entry once
        return web.json_response(said)

    clinic.encode.chat = reports_another
    complaints = dict(await clinic.complaints())

    assert complaints["store"] == "does not have the entry that an instance just wrote"


async def test_a_consumer_of_another_namespace_is_found(clinic: Clinic) -> None:
    clinic.prefill.metrics = page('# HELP\nvllm:ec_store_namespace_info{namespace="other"} 1.0\n')
    complaints = dict(await clinic.complaints())

    assert f"other at {clinic.prefill.url}" in complaints["namespaces"]
    assert clinic.encode.url in complaints["namespaces"]


async def test_a_model_that_needs_raw_media_is_reported(clinic: Clinic) -> None:
    encodes = clinic.encode.chat

    async def without_metadata(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = await encodes(request, body)
        said = json.loads(cast("web.Response", reply).text or "")
        for entry in said["ec_transfer_params"].values():
            del entry["metadata"]
        return web.json_response(said)

    clinic.encode.chat = without_metadata
    seen = {one.seen for one in await clinic.findings()}

    assert "finds encoder outputs by their key alone" not in seen
    assert (
        "vLLM reports no placeholder metadata for this model: media go to prefill and decode"
        in seen
    )


async def test_encode_instances_without_chat_route_and_without_connector_differ(
    clinic: Clinic,
) -> None:
    clinic.encode.chat = refuses(404, "Not Found")
    [finding] = [one for one in await clinic.findings() if one.verdict is Verdict.FAIL]

    assert finding.subject == f"encode {clinic.encode.url}"
    assert "Whisper" in finding.advice


async def test_a_prefill_instance_that_keeps_nothing_is_found(clinic: Clinic) -> None:
    clinic.prefill.chat = decodes

    [(subject, seen)] = await clinic.complaints()
    assert subject == f"prefill {clinic.prefill.url}"
    assert "no kv_transfer_params" in seen


async def test_a_decode_instance_that_refuses_is_found(clinic: Clinic) -> None:
    clinic.decode.chat = refuses(400, "no connector here")

    [(subject, seen)] = await clinic.complaints()
    assert subject == f"decode {clinic.decode.url}"
    assert "no connector here" in seen


async def test_a_model_that_takes_no_pictures_is_tried_with_a_sound(clinic: Clinic) -> None:
    refusal = refuses(400, "At most 0 image(s) may be provided in one prompt.")
    divert(clinic.encode, lambda body: "image_url" in body["messages"][0]["content"][0], refusal)

    assert await clinic.complaints() == []
    assert len(clinic.encode.calls) == 2


async def test_an_unreachable_instance_is_a_failure_and_the_others_are_examined(
    clinic: Clinic,
) -> None:
    clinic.decode.url = "http://127.0.0.1:9"

    found = await clinic.findings()

    [away] = [one for one in found if one.verdict is Verdict.FAIL]
    assert away.subject == "decode http://127.0.0.1:9"
    assert away.seen.startswith("the instance is unreachable (")
    assert "no process listens there" in away.advice
    assert found[0] is away
    assert any(one.seen == "finds encoder outputs by their key alone" for one in found)


async def test_an_unhealthy_instance_is_a_failure(clinic: Clinic) -> None:
    clinic.encode.healthy = False

    assert (f"encode {clinic.encode.url}", "GET /health: 503") in await clinic.complaints()


async def test_a_server_that_answers_all_paths_but_is_not_vllm_is_found(clinic: Clinic) -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello") if _.path == "/health" else web.Response(status=405)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hello)
    async with TestServer(app) as server:
        clinic.decode.url = str(server.make_url("")).rstrip("/")
        [finding, *_] = await clinic.findings(requests=False)

    assert finding.subject == f"decode {clinic.decode.url}"
    assert finding.seen == "GET /version: 405, GET /v1/models: 405"
    assert "not vLLM" in finding.advice


@pytest.mark.parametrize(
    ("spoil", "subject"),
    [
        (lambda one: setattr(one, "version", "0.32.1"), "versions"),
        (lambda one: setattr(one, "models", ("m", "other")), "models"),
    ],
)
async def test_instances_that_differ_are_found(
    clinic: Clinic, spoil: Callable[[FakeInstance], None], subject: str
) -> None:
    spoil(clinic.decode)

    assert [name for name, _ in await clinic.complaints()] == [subject]


async def test_a_missing_store_is_a_failure_and_is_not_created(
    clinic: Clinic, tmp_path: Path
) -> None:
    folder = tmp_path / "typo" / "x"
    clinic.store = f"file://{folder}?max_bytes=1MiB"

    [finding] = [one for one in await clinic.findings() if one.verdict is not Verdict.OK]

    assert (finding.verdict, finding.subject) == (Verdict.FAIL, "store")
    assert finding.seen == f"there is no store in {folder}"
    assert "--ec-transfer-config" in finding.advice
    assert "ec-store configure" in finding.advice
    assert not folder.parent.exists()


async def test_an_unreachable_store_is_a_failure(clinic: Clinic) -> None:
    clinic.store = "redis://127.0.0.1:9/?connect_timeout=0.2s"

    assert [name for name, _ in await clinic.complaints()] == ["store"]


async def test_a_store_with_unreadable_entries_is_reported(clinic: Clinic, tmp_path: Path) -> None:
    encode = clinic.encode.chat

    def written() -> list[Path]:
        found = (tmp_path / "store" / "entries").rglob("*")
        return [path for path in found if path.is_file() and path.suffix != ".tmp"]

    async def spoiled(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await encode(request, body)
        await until(written)  # the answer does not wait for the write
        for path in written():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return answer

    clinic.encode.chat = spoiled

    assert ("store", "the proxy cannot read the entry that an instance just wrote") in (
        await clinic.complaints()
    )


def test_the_headers_have_the_proxys_key() -> None:
    config = ProxyConfig(
        encode_servers_urls=("http://e",),
        decode_servers_urls=("http://d",),
        openai_api_key="sk-test-0123456789",
    )

    assert headers_of(config) == {"Authorization": "Bearer sk-test-0123456789"}


async def test_the_command_reports_findings_and_fails(clinic: Clinic) -> None:
    async def doctor(decode: FakeInstance, *flags: str) -> tuple[int | None, str]:
        urls = ("--encode-servers-urls", clinic.encode.url, "--decode-servers-urls", decode.url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "epd", "doctor", *flags, *urls),
            *("--ec-store", clinic.store, "--ec-store-budget-s", "5"),
            stdout=asyncio.subprocess.PIPE,
        )
        text, _ = await process.communicate()
        return process.returncode, text.decode()

    clinic.prefill.healthy = False
    (code, well), (failed, text) = await asyncio.gather(
        doctor(clinic.decode, "--format", "json"), doctor(clinic.prefill, "--no-requests")
    )

    assert (code, json.loads(well)["verdict"]) == (0, "warn")
    assert failed == 1
    assert f"fail  prefill_decode {clinic.prefill.url}" in text
    assert "-> start it again: its engine has died" in text


KEY = "0123456789abcdef"
NOBODY: dict[str, Any] = {
    "encode_servers_urls": (),
    "prefill_servers_urls": (),
    "decode_servers_urls": (),
}


def ill(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(one.subject, one.seen) for one in findings if one.verdict is not Verdict.OK}


async def test_instances_of_a_file_of_the_dns_and_of_the_store_of_registrations_are_looked_at(
    clinic: Clinic, tmp_path: Path
) -> None:
    file = tmp_path / "instances.yaml"
    file.write_bytes(write_json([Instance(Role.PREFILL, clinic.prefill.url)]))
    registered = (
        Instance(Role.DECODE, clinic.decode.url),
        Instance(Role.PREFILL_DECODE, "http://x"),
    )
    port = clinic.encode.url.rpartition(":")[2]
    with RedisServer(tmp_path / "redis") as redis:
        async with RegistrationsInRedis.connected(redis.url()) as store:
            await store.write(registered)
        async with NameServer({"encode.test": ["127.0.0.1"]}).running() as server:
            findings = await clinic.findings(
                **NOBODY,
                instances_file=file,
                dynamic_registration=True,
                admin_api_key=KEY,
                registration_store=redis.url(),
                discover_encode=f"encode.test:{port}",
                discovery_dns_server=server.address,
            )

    assert ill(findings) == {
        ("prefill_decode http://x", "is not used: its role conflicts with that of another instance")
    }
    seen = {one.seen for one in findings}
    assert {
        "encodes, and reports where its outputs are",
        "answers requests that a prefill instance prefilled",
    } <= seen


async def test_sources_that_cannot_be_used_are_found(clinic: Clinic, tmp_path: Path) -> None:
    async with NameServer({"empty.test": []}).running() as server:
        findings = await clinic.findings(
            **NOBODY,
            instances_file=tmp_path / "nowhere",
            dynamic_registration=True,
            admin_api_key=KEY,
            registration_store="redis://127.0.0.1:1",
            discover_encode="empty.test:1",
            discovery_dns_server=server.address,
        )

    assert {
        (f"file {tmp_path}/nowhere", "it does not exist"),
        ("registration", "the store cannot be read: ConnectionError"),
        ("encode empty.test", "it has no address"),
        ("instances", "none decodes: every request gets a 503"),
        ("instances", "none encodes"),
    } <= ill(findings)


async def test_registrations_in_a_proxys_memory_are_reported_as_not_visible(clinic: Clinic) -> None:
    findings = await clinic.findings(**NOBODY, dynamic_registration=True, admin_api_key=KEY)

    assert (
        "registration",
        "the doctor cannot see which instances are registered with a running proxy",
    ) in (ill(findings))
    assert not [one for one in findings if one.verdict is Verdict.FAIL]


async def test_a_fleet_that_pushes_encoder_outputs_is_tried_rank_by_rank(clinic: Clinic) -> None:
    pushes, where = Pushes(), ("tcp://d:1", "tcp://d:2")
    clinic.encode.chat, clinic.decode.chat = pushes.encodes, pushes.consumes(*where)
    config: dict[str, Any] = {
        "prefill_servers_urls": (),
        "ec_store": None,
        "ec_consumer_zmq_addrs": where,
        "ec_consumer_dp_size": 2,
    }

    assert await clinic.complaints(**config) == []
    assert [address for address, _ in pushes.pushed] == list(where)
    assert (pushes.wrong, pushes.waiting) == ([], {})
    clinic.decode.chat = pushes.consumes("tcp://other:1", "tcp://other:2")
    assert (f"prefill_decode {clinic.decode.url}", "metadata: never pushed") in [
        (subject, seen) for subject, seen in await clinic.complaints(**config)
    ]


async def test_encode_instances_with_unreadable_memory_are_reported(clinic: Clinic) -> None:
    memory = Memory()
    clinic.encode.chat = memory.encodes(5601)
    clinic.prefill.chat = memory.consumes(prefills)
    config: dict[str, Any] = {"ec_store": None, "ec_transfer": "nixl"}

    assert await clinic.complaints(**config) == []
    assert memory.wrong == []
    clinic.encode.chat = encodes
    assert (
        f"encode {clinic.encode.url}",
        "encode: encodes, but its ec_transfer_params have no peer_host",
    ) in await clinic.complaints(**config)


async def test_instances_must_accept_subscribers_to_their_events(clinic: Clinic) -> None:
    following: dict[str, Any] = {"prefill_balance": "content", "kv_events": True}
    with publishers(1) as [publisher]:
        findings = await clinic.findings(kv_events_addrs=(publisher.address,), **following)
        assert [one for one in findings if one.verdict is not Verdict.OK] == []
        assert "accepts subscribers to its KV events" in {one.seen for one in findings}
        address = publisher.address

    [found] = await clinic.complaints(kv_events_addrs=(address,), health_timeout_s=0.5, **following)
    assert found == (
        f"prefill {clinic.prefill.url}",
        f"KV events: {address} accepts no subscriber",
    )
