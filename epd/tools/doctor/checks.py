"""Checks of `epd doctor`: a table for each kind of facts.

A row has the verdict, the component, what is seen if the check applies, and what to change. A new
check is a new row. No I/O.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from ec_store.config import size_text
from epd.edge.access import is_loopback
from epd.routing.instances import Role
from epd.tools.doctor import facts
from epd.tools.doctor.facts import HostFacts, InstanceFacts, StoreFacts
from epd.tools.doctor.findings import FAIL, OK, WARN, Finding, Verdict

Facts = TypeVar("Facts")
Fleet = Sequence[InstanceFacts]
"""Instances that can be used."""

MIN_SOMAXCONN = 1024
"""Value of `net.core.somaxconn` below which a burst of clients may not fit."""

LOAD_BALANCER_S = 60.0
"""Idle timeout of connections of common load balancers. A proxy behind one must keep idle
connections for longer; otherwise it may close a connection while a request arrives on it."""

MAX_SKEW_S = 5.0
"""Maximum difference of two clocks. A `Date` header has a resolution of one second."""

OLDEST = (0, 32)
"""First version of vLLM that reports `ec_transfer_params` from encode instances."""

NOT_FOUND, UNAVAILABLE = 404, 503

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "ceph", "fuse.ceph", "fuse.ceph-fuse", "lustre", "beegfs"}
)
"""File systems that several hosts mount."""

SPLIT = (
    "install this version of the connector in the environment of every engine, and put the model's "
    "config.json beside its weights: the processes of one engine derive the namespace from it. The "
    "engine's log shows each namespace, after `namespace`"
)
ON_DEVICE = (
    "Without videos, --mm-tensor-ipc torch_shm and VLLM_WORKER_MULTIPROC_METHOD=spawn move the "
    "processor to the device"
)
"""Advice for an encode instance beside a device. With the processor on CUDA, vLLM decodes videos
with NVDEC, which changes their keys (`VllmConfig._resolve_mm_video_decode_device`)."""
NO_CHAT = (
    "the model has no chat route, which encode requests need. Models for transcription (Whisper) "
    "or embeddings have none: vLLM cannot run their encoders apart. Serve the model without "
    "encode instances: `epd up --topology 1pd`"
)


class Check(NamedTuple, Generic[Facts]):
    """Row of a table of checks.

    Attributes:
        subject: component that it is about; empty: that of the facts.
        see: returns what is seen if the check applies, otherwise a false value.
        advice: what to change; empty: nothing.
        is_last: whether further checks would only show the consequences of this finding.
    """

    verdict: Verdict
    subject: str
    see: Callable[[Facts], str | bool | None]
    advice: str = ""
    is_last: bool = False


class TrialCheck(NamedTuple):
    """Row of the table of trial requests: what is seen if one succeeds, and what if it fails."""

    seen: str
    verdict: Verdict = OK
    advice: str = ""


def _is_private(host: HostFacts) -> bool:
    """Return whether the proxy's operator routes are open to this machine's clients alone."""
    return not host.config.uds and is_loopback(host.config.host)


def _fetches_directly(host: HostFacts) -> bool:
    return host.config.media_fetch == "proxy" and not host.config.media_fetch_trust_env


def _is_old(version: str | None) -> bool:
    """Return whether a version is below `OLDEST`; a build such as 0.1.dev3 is not."""
    parts = (version or "").split(".")
    if len(parts) < len(OLDEST) or "dev" in parts[-1]:
        return False
    return all(part.isdigit() for part in parts[:2]) and (int(parts[0]), int(parts[1])) < OLDEST


def _api_servers(engine: InstanceFacts) -> int:
    """Return the API servers of an encode instance; 0: not known."""
    encodes = engine.instance.role is Role.ENCODE
    return engine.preparation.api_servers if encodes and engine.preparation is not None else 0


def _preparation(engine: InstanceFacts) -> str:
    """Return how an encode instance prepares media; empty: not known."""
    count = _api_servers(engine)
    if not count or engine.preparation is None:
        return ""
    servers = "one API server" if count == 1 else f"{count} API servers"
    return f"prepares media in {servers}, with the processor on {engine.preparation.processor}"


def _is_beside_device(engine: InstanceFacts) -> bool:
    """Return whether media are prepared on the CPU, beside a device that encodes them."""
    found = engine.preparation
    return found is not None and found.processor == "cpu" != found.device


def _differences(fleet: Fleet, values: Callable[[InstanceFacts], Iterable[str | None]]) -> str:
    """Return which instances have which of these values; empty: they do not differ."""
    holders: dict[str, list[str]] = {}
    for engine in fleet:
        for value in filter(None, values(engine)):
            holders.setdefault(value, []).append(engine.instance.url)
    seen = (f"{value} at {', '.join(holders[value])}" for value in sorted(holders))
    return "; ".join(seen) if len(holders) > 1 else ""


def _different_lengths(fleet: Fleet) -> str:
    consumers = [engine for engine in fleet if engine.instance.role is not Role.ENCODE]
    for name in sorted({name for engine in consumers for name in engine.model_names}):
        if lengths := _differences(consumers, partial(_lengths, name)):
            return f"max_model_len of {name} differs: {lengths}"
    return ""


def _lengths(name: str, engine: InstanceFacts) -> Sequence[str]:
    return [str(engine.max_model_len(name) or "")]


def _media_io(engine: InstanceFacts) -> Sequence[str]:
    return [] if engine.preparation is None else [", ".join(engine.preparation.media_io) or "none"]


def _models(fleet: Fleet, *, adapters: bool = False) -> set[str]:
    every = (model for engine in fleet for model in engine.models)
    return {model.name for model in every if adapters or model.parent is None}


def _lacking_models(fleet: Fleet) -> str:
    """Return which instances lack which models; encode instances need no adapters."""
    names = {role: _models(fleet, adapters=role is not Role.ENCODE) for role in Role}
    return "; ".join(
        f"{engine.instance.url} lacks {', '.join(sorted(missing))}"
        for engine in fleet
        if (missing := names[engine.instance.role] - engine.model_names)
    )


# fmt: off
HOST: Sequence[Check[HostFacts]] = (
    Check(WARN, "descriptors", lambda host: host.descriptors < host.needed_descriptors
        and f"a process may open {host.descriptors}, --max-requests needs "
            f"{host.needed_descriptors}",
        "raise the hard limit (ulimit -Hn, LimitNOFILE=)"),
    Check(WARN, "backlog", lambda host: (host.somaxconn or MIN_SOMAXCONN) < MIN_SOMAXCONN
        and f"the kernel queues {host.somaxconn} connections until the proxy accepts them: in a "
            "larger burst, clients wait 1 s or longer to connect",
        "run sysctl -w net.core.somaxconn=4096 here, and in the proxy's container or pod: it is a "
        "setting of the network namespace"),
    Check(WARN, "media", lambda host: not host.media_readable
        and f"{host.config.allowed_local_media_path} cannot be read on this machine",
        "mount it as on the instances"),
    Check(WARN, "media", lambda host: host.config.media_fetch != "proxy"
        and "engines fetch http(s) media themselves, from every host that they can reach",
        "give the engines --allowed-media-domains, or the proxy --media-fetch proxy"),
    Check(WARN, "media",
        lambda host: host.config.media_fetch == "proxy" and not host.config.allowed_media_domains
        and "the proxy fetches from any host with a public address",
        "name the allowed hosts in --allowed-media-domains"),
    Check(WARN, "media", lambda host: _fetches_directly(host) and host.has_forward_proxy
        and "the proxy fetches media directly, although HTTP_PROXY or HTTPS_PROXY is set",
        "set --media-fetch-trust-env if only the forward proxy reaches the origins"),
    Check(WARN, "keep-alive", lambda host: host.config.keep_alive_s <= LOAD_BALANCER_S
        and f"the proxy closes idle client connections after {host.config.keep_alive_s:g} s",
        "set --keep-alive-s above the idle timeout of the load balancer, often 60 s"),
    Check(WARN, "access", lambda host: host.config.admin_api_key is None and not _is_private(host)
        and "no admin key: the operator's routes, such as /metrics, answer "
        + ("only the proxy's own user" if host.config.uds else "403"),
        "set EPD_ADMIN_API_KEY, or let --host be a loopback address"),
    Check(WARN, "access",
        lambda host: "*" in host.config.allowed_origins and host.config.api_keys_file is None
        and "no API keys and any origin: every web page in a client's browser can use the proxy",
        "name the allowed origins in --allowed-origins, or set --api-keys-file"),
    Check(WARN, "access",
        lambda host: host.config.api_keys_file is not None and host.config.key_secret is None
        and "no key secret: a process that can list the store can guess tenants' keys",
        "set EPD_KEY_SECRET, the same for every replica"),
)

INSTANCE: Sequence[Check[InstanceFacts]] = (
    Check(FAIL, "", lambda engine: engine.refuses and engine.problem,
        "start it, or remove it from the configuration: no process listens there. If it ran "
        "before, its log has the reason; without one it was killed, most often for lack of memory "
        "(dmesg)", is_last=True),
    Check(FAIL, "", lambda engine: engine.status == UNAVAILABLE and engine.problem,
        "start it again: its engine has died, and its log has the reason", is_last=True),
    Check(FAIL, "", lambda engine: engine.status is not None and engine.problem,
        "correct the URL: another server answers there, not vLLM", is_last=True),
    Check(FAIL, "", lambda engine: engine.problem,
        "start it, or remove it from the configuration", is_last=True),
    Check(OK, "", lambda engine: f"vLLM {engine.version or 'of an unknown version'}, serves "
        f"{', '.join(model.name for model in engine.models) or 'nothing'}"),
    Check(WARN, "", lambda engine: _is_old(engine.version)
        and f"vLLM {engine.version} reports no ec_transfer_params: media go to every stage",
        "use vLLM 0.32 or newer"),
    Check(WARN, "", lambda engine: abs(engine.skew_s or 0) > MAX_SKEW_S
        and f"its clock differs from this machine's by {engine.skew_s:+.0f} s",
        "run NTP on both: entries and leases of a store on a shared file system expire by them"),
    Check(FAIL, "", lambda engine: len(engine.namespaces) > 1
        and f"has several namespaces: {', '.join(sorted(engine.namespaces))}", SPLIT),
    Check(OK, "", lambda engine: not _is_beside_device(engine) and _preparation(engine)),
    Check(WARN, "", lambda engine: _is_beside_device(engine) and _api_servers(engine) == 1
        and f"{_preparation(engine)}: its device may wait for it",
        "start it with --api-server-count 4, or as many as it has cores to itself. " + ON_DEVICE),
    Check(OK, "", lambda engine: _is_beside_device(engine) and _api_servers(engine) > 1
        and f"{_preparation(engine)}, beside a device", ON_DEVICE),
)

TRIALS: Mapping[str, TrialCheck] = {
    facts.ENCODE: TrialCheck("encodes, and reports where its outputs are", FAIL,
        "start it with --ec-transfer-config, ec_role ec_producer (ec_both for --servers-urls), and "
        "the connector that --ec-transfer names"),
    facts.RAW: TrialCheck(
        "vLLM reports no placeholder metadata for this model: media go to prefill and decode"),
    facts.CONSUME: TrialCheck("finds encoder outputs by their key alone", FAIL,
        "start it with --ec-transfer-config, ec_role ec_consumer, the connector of the encode "
        "instances, and their store if they have one; for nixl and mooncake with "
        "VLLM_USE_V2_MODEL_RUNNER=1"),
    facts.PREFILL: TrialCheck("hands over its KV cache", FAIL,
        "start it with --kv-transfer-config, kv_role kv_producer, and the connector that "
        "--kv-transfer names"),
    facts.DECODE: TrialCheck("answers requests that a prefill instance prefilled", FAIL,
        "start it with --kv-transfer-config, kv_role kv_consumer, and the same connector. It must "
        "reach the connectors of the prefill instances: check VLLM_NIXL_SIDE_CHANNEL_HOST and "
        "_PORT, or its kv_addr"),
    facts.FORGET: TrialCheck(
        "keeps no blocks of a conversation for its next turn: bidirectional_kv_xfer is not set"),
    # Without the blocks, prefill computes every turn, some after a wait of --prefill-timeout-s.
    facts.READ: TrialCheck(
        "reads the blocks that decode keeps of a conversation's previous turn", WARN,
        "set bidirectional_kv_xfer in its --kv-transfer-config, as in decode's. It must reach the "
        "connectors of the decode instances: check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT"),
    facts.EVENTS: TrialCheck("accepts subscribers to its KV events", WARN,
        "start it with --kv-events-config "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\', and name its address '
        "in --kv-events-addrs if it has another host or port. Until then its prefix cache is "
        "estimated"),
}

FLEET: Sequence[Check[Fleet]] = (
    Check(FAIL, "models", _lacking_models,
        "serve the same models under the same names, and the same --lora-modules on all prefill, "
        "decode and prefill_decode instances; encode instances need no adapters"),
    Check(OK, "models", lambda fleet: bool(fleet) and not _lacking_models(fleet)
        and "every instance serves " + (", ".join(sorted(_models(fleet))) or "nothing")),
    Check(WARN, "models", _different_lengths,
        "give prefill and decode instances the same --max-model-len"),
    Check(WARN, "versions", lambda fleet: _differences(fleet, lambda engine: [engine.version]),
        "run one version of vLLM: the fields that stages exchange differ between versions"),
    Check(FAIL, "namespaces", lambda fleet: all(len(engine.namespaces) <= 1 for engine in fleet)
        and _differences(fleet, lambda engine: engine.namespaces),
        "serve the same weights, revision, dtype and processor options on all encode, prefill and "
        "prefill_decode instances: one does not find the entries of another namespace"),
    Check(WARN, "media-io-kwargs", lambda fleet: _differences(fleet, _media_io),
        "give all encode, prefill and prefill_decode instances the same: with different ones, an "
        "item has several keys. vLLM sets them for videos (NVDEC) on an encode instance with its "
        "processor on CUDA: set --mm-processor-device cpu there"),
)

STORE: Sequence[Check[StoreFacts]] = (
    Check(WARN, "store", lambda store: not store.is_configured
        and "the proxy has none: every item is encoded, even a repeated one",
        "set --ec-store to the store of the engines' --ec-transfer-config", is_last=True),
    Check(FAIL, "store", lambda store: store.is_missing and store.problem,
        "name the store of the engines' --ec-transfer-config: an engine with ECStoreConnector "
        "creates it at its start, and so do `ec-store serve` and `ec-store configure`",
        is_last=True),
    Check(FAIL, "store", lambda store: store.problem,
        "repair it: until then every item of a request is encoded", is_last=True),
    Check(FAIL, "store", lambda store: store.is_full
        and f"its file system is full ({size_text(store.free_bytes or 0)} are free): the entry "
            "that an instance just wrote was dropped",
        "delete other files there, or use a larger file system; the store evicts only its own "
        "entries", is_last=True),
    Check(OK, "store", lambda store: store.round_trip_s <= store.budget_s / 2
        and f"{store.round_trip_s * 1000:.1f} ms per lookup"),
    Check(WARN, "store", lambda store: store.round_trip_s > store.budget_s / 2
        and f"{store.round_trip_s * 1000:.1f} ms per lookup, of a budget of "
            f"{store.budget_s * 1000:.0f} ms",
        "place it nearer to the proxy, or raise --ec-store-budget-s"),
    Check(OK, "store", lambda store: store.entry == "read"
        and "has the entry that an instance just wrote"),
    Check(FAIL, "store", lambda store: store.entry == "found"
        and "the proxy cannot read the entry that an instance just wrote",
        "run engines and proxy as one user, or share a group: "
        "?dir_mode=2770 in every store URL"),
    Check(FAIL, "store", lambda store: store.entry == "missing"
        and "does not have the entry that an instance just wrote",
        "name the same store in --ec-store and in the engines' --ec-transfer-config, and the same "
        "version of the connector in all: an engine may report another namespace than it uses"),
    Check(WARN, "store", lambda store: not store.is_writable and "the proxy cannot write to it",
        "permit it: otherwise an item that two proxies see at once is encoded twice, and names "
        "for media are not kept"),
    Check(WARN, "store", lambda store: store.writing_bytes is not None and store.max_bytes is None
        and "Redis has no maxmemory: it grows until its machine has no memory left",
        "set maxmemory and maxmemory-policy volatile-lru"),
    Check(WARN, "store", lambda store: (store.max_bytes or 0) < 2 * (store.writing_bytes or 0)
        and store.max_bytes is not None
        and f"its maxmemory is {size_text(store.max_bytes)}, and writers may take "
            f"{size_text(store.writing_bytes or 0)} of that from the entries",
        "raise maxmemory to that sum, or set max_entry_bytes in the store's URL to the largest "
        "encoder output"),
    Check(WARN, "store", lambda store: store.room_bytes < (store.max_bytes or 0)
        and f"its quota is {size_text(store.max_bytes or 0)}, but its file system has only "
            f"{size_text(int(store.room_bytes))} for it",
        "lower it with `ec-store configure URL --max-bytes SIZE` (max_bytes in a URL counts only "
        "when the store is created), or use a larger file system"),
    Check(WARN, "store", lambda store: store.mount is not None and store.mount.kind in NETWORK
        and f"it is on the {store.mount.kind} mount at {store.mount.path}, and network file "
            "systems are not tested",
        "use redis:// for several hosts, and shm:// or a local directory for one"),
)
# fmt: on


def judge(checks: Iterable[Check[Facts]], about: Facts, subject: str = "") -> Iterator[Finding]:
    """Yield a finding for each check that applies to the facts."""
    for check in checks:
        if seen := check.see(about):
            yield Finding(check.verdict, check.subject or subject, str(seen), check.advice)
            if check.is_last:
                return


def judge_trials(instance: InstanceFacts) -> Iterator[Finding]:
    """Yield a finding for each trial request."""
    for stage, (problem, status) in instance.trials.items():
        seen, verdict, advice = TRIALS[stage]
        if not problem:
            yield Finding(OK, instance.name, seen)
            continue
        # For an unknown model, vLLM's 404 has other words.
        unrouted = stage == facts.ENCODE and status == NOT_FOUND and "Not Found" in problem
        yield Finding(
            verdict, instance.name, f"{stage}: {problem}", NO_CHAT if unrouted else advice
        )
