"""Findings derived from facts about instances and the store. No I/O."""

from collections.abc import Iterable, Iterator, Sequence

from ec_store.config import size_text
from epd.config import ProxyConfig
from epd.routing.instances import Role
from epd.tools.doctor.facts import (
    Finding,
    InstanceFacts,
    Mount,
    Preparation,
    StoreFacts,
    Trial,
    Verdict,
    fail,
    ok,
    warn,
)

MAX_SKEW_S = 5.0
"""Maximum difference of two clocks. A `Date` header has a resolution of one second."""

OLDEST = (0, 32)
"""First version of vLLM that reports `ec_transfer_params` from encode instances."""

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "ceph", "fuse.ceph", "fuse.ceph-fuse", "lustre", "beegfs"}
)
"""File systems that several hosts mount."""

ENCODE, CONSUME, PREFILL, DECODE = "encode", "metadata", "prefill", "decode"
READ, FORGET = "conversation", "no conversation"
EVENTS = "KV events"
RAW = "media"
"""Names of the trial requests."""

NOT_FOUND, UNAVAILABLE = 404, 503

FULL_BYTES = 16 * 1024**2
"""Free bytes of a file system below which a missing entry is explained by the lack of room."""

SPLIT = (
    "install this version of the connector in the environment of every engine, and put the model's "
    "config.json beside its weights: the processes of one engine derive the namespace from it. The "
    "engine's log shows each namespace, after `namespace`"
)

ADVICE = {
    ENCODE: "start it with --ec-transfer-config, ec_role ec_producer, and the connector that "
    "--ec-transfer names",
    CONSUME: "start it with --ec-transfer-config, ec_role ec_consumer, the connector of the encode "
    "instances, and their store if they have one; for nixl and mooncake with "
    "VLLM_USE_V2_MODEL_RUNNER=1",
    PREFILL: "start it with --kv-transfer-config, kv_role kv_producer, and the connector that "
    "--kv-transfer names",
    DECODE: "start it with --kv-transfer-config, kv_role kv_consumer, and the same connector. It "
    "must reach the connectors of the prefill instances: check VLLM_NIXL_SIDE_CHANNEL_HOST and "
    "_PORT, or its kv_addr",
    READ: "set bidirectional_kv_xfer in its --kv-transfer-config, as in decode's. It must reach "
    "the connectors of the decode instances: check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT",
    EVENTS: "start it with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\', and name its address in '
    "--kv-events-addrs if it has another host or port. Until then its prefix cache is estimated",
}
NO_STORE = (
    "name the store of the engines' --ec-transfer-config: an engine with ECStoreConnector creates "
    "it at its start, and so do `ec-store serve` and `ec-store configure`"
)
NO_CHAT = (
    "the model has no chat route, which encode requests need. Models for transcription (Whisper) "
    "or embeddings have none: vLLM cannot run their encoders apart. Serve the model without "
    "encode instances: `epd up --topology 1pd`"
)
"""Advice for an encode instance that answers a chat request with 404, but knows the model."""

SAME_MODELS = (
    "serve the same models under the same names, and the same --lora-modules on all prefill, "
    "decode and prefill_decode instances; encode instances need no adapters"
)

SERVERS = "start it with --api-server-count 4, or as many as it has cores to itself"
ON_DEVICE = (
    "Without videos, --mm-tensor-ipc torch_shm and VLLM_WORKER_MULTIPROC_METHOD=spawn move the "
    "processor to the device"
)
"""Advice for an encode instance beside a device. With the processor on CUDA, vLLM decodes videos
with NVDEC, which changes their keys (`VllmConfig._resolve_mm_video_decode_device`)."""

SEEN = {
    ENCODE: "encodes, and reports where its outputs are",
    CONSUME: "finds encoder outputs by their key alone",
    PREFILL: "hands over its KV cache",
    DECODE: "answers requests that a prefill instance prefilled",
    READ: "reads the blocks that decode keeps of a conversation's previous turn",
    RAW: "vLLM reports no placeholder metadata for this model: media go to prefill and decode",
    EVENTS: "accepts subscribers to its KV events",
    FORGET: "keeps no blocks of a conversation for its next turn: bidirectional_kv_xfer is not set",
}


def judge_instance(facts: InstanceFacts, *, full: bool = False) -> Iterator[Finding]:
    """Yield the findings about one instance; `full`: the store had no room for its output."""
    name = f"{facts.instance.role} {facts.instance.url}"
    if facts.problem is not None:
        yield fail(name, facts.problem, _repair(facts))
        return
    models = ", ".join(model.name for model in facts.models)
    yield ok(name, f"vLLM {facts.version or 'of an unknown version'}, serves {models or 'nothing'}")
    yield from _judge_version(name, facts)
    yield from _judge_clock(name, facts)
    if facts.keeps_alive is False:
        yield warn(
            name,
            "closes idle connections before the proxy does",
            "set VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5 or more",
        )
    if facts.instance.role is Role.ENCODE and facts.preparation is not None:
        yield from _judge_preparation(name, facts.preparation)
    for stage, trial in facts.trials.items():
        if not (full and stage == CONSUME):  # it could only fail
            yield _judge_trial(name, stage, trial)


def _repair(facts: InstanceFacts) -> str:
    if facts.refuses:
        return (
            "start it, or remove it from the configuration: no process listens there. If it ran "
            "before, its log has the reason; without one it was killed, most often for lack of "
            "memory (dmesg)"
        )
    if facts.answered is None:
        return "start it, or remove it from the configuration"
    if facts.answered == UNAVAILABLE:
        return "start it again: its engine has died, and its log has the reason"
    return "correct the URL: another server answers there, not vLLM"


def _judge_version(name: str, facts: InstanceFacts) -> Iterator[Finding]:
    numbers = _release(facts.version)
    if numbers is not None and numbers < OLDEST:
        yield warn(
            name,
            f"vLLM {facts.version} reports no ec_transfer_params: media go to every stage",
            "use vLLM 0.32 or newer",
        )


def _release(version: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None: a build without them, such as 0.1.dev3."""
    parts = (version or "").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]) or "dev" in parts[-1]:  # noqa: PLR2004
        return None
    return int(parts[0]), int(parts[1])


def _judge_clock(name: str, facts: InstanceFacts) -> Iterator[Finding]:
    if facts.skew_s is not None and abs(facts.skew_s) > MAX_SKEW_S:
        yield warn(
            name,
            f"its clock differs from this machine's by {facts.skew_s:+.0f} s",
            "run NTP on both: entries and leases of a store on a shared file system expire by them",
        )


def _judge_preparation(name: str, facts: Preparation) -> Iterator[Finding]:
    count = facts.api_servers
    servers = "one API server" if count == 1 else f"{count} API servers"
    seen = f"prepares media in {servers}, with the processor on {facts.processor}"
    if facts.processor != "cpu" or facts.device == "cpu":
        yield ok(name, seen)
    elif count == 1:
        advice = f"{SERVERS}. {ON_DEVICE}"
        yield warn(name, f"{seen}: its {facts.device} device may wait for it", advice)
    else:
        yield Finding(Verdict.OK, name, f"{seen}, beside a {facts.device} device", ON_DEVICE)


def _judge_trial(name: str, stage: str, trial: Trial) -> Finding:
    if trial.problem is None:
        return ok(name, SEEN[stage])
    # Without the blocks, prefill computes every turn, some after a wait of --prefill-timeout-s.
    say = warn if stage in {READ, EVENTS} else fail
    unrouted = stage == ENCODE and trial.status == NOT_FOUND and "Not Found" in trial.problem
    return say(name, f"{stage}: {trial.problem}", NO_CHAT if unrouted else ADVICE[stage])


def judge_fleet(facts: Sequence[InstanceFacts]) -> Iterator[Finding]:
    """Yield the findings about all instances together."""
    reachable = [fact for fact in facts if fact.problem is None]
    yield from _judge_models(reachable)
    versions = sorted({fact.version for fact in reachable if fact.version})
    if len(versions) > 1:
        yield warn(
            "versions",
            ", ".join(versions),
            "run one version of vLLM: the fields that stages exchange differ between versions",
        )
    yield from _judge_namespaces(reachable)
    yield from _judge_media_io(reachable)


def _judge_media_io(reachable: Iterable[InstanceFacts]) -> Iterator[Finding]:
    holders: dict[tuple[str, ...], list[str]] = {}
    for fact in reachable:
        if fact.preparation is not None:
            holders.setdefault(fact.preparation.media_io, []).append(fact.instance.url)
    if len(holders) > 1:
        seen = (f"{', '.join(kinds) or 'none'} at {', '.join(holders[kinds])}" for kinds in holders)
        yield warn(
            "media-io-kwargs",
            f"differ, so that the same item has several keys: {'; '.join(seen)}",
            "give all encode, prefill and prefill_decode instances the same. vLLM sets them for "
            "videos (NVDEC) on an encode instance with its processor on CUDA: set "
            "--mm-processor-device cpu there",
        )


def _judge_namespaces(reachable: Sequence[InstanceFacts]) -> Iterator[Finding]:
    holders: dict[str, list[str]] = {}
    for fact in reachable:
        for namespace in sorted(fact.namespaces):
            holders.setdefault(namespace, []).append(fact.instance.url)
        if len(fact.namespaces) > 1:
            yield fail(
                f"{fact.instance.role} {fact.instance.url}",
                f"has several namespaces: {', '.join(sorted(fact.namespaces))}",
                SPLIT,
            )
    if len(holders) > 1 and all(len(fact.namespaces) <= 1 for fact in reachable):
        yield fail(
            "namespaces",
            "; ".join(f"{name} at {', '.join(holders[name])}" for name in sorted(holders)),
            "serve the same weights, revision, dtype and processor options on all encode, prefill "
            "and prefill_decode instances: one does not find the entries of another namespace",
        )


def _judge_models(reachable: Sequence[InstanceFacts]) -> Iterator[Finding]:
    if not reachable:
        return
    listed = [model for fact in reachable for model in fact.models]
    adapters = {model.name for model in listed if model.parent is not None}
    every = {model.name for model in listed}
    # Encode instances have no language model, and so load no adapters.
    wanted = {role: every - adapters if role is Role.ENCODE else every for role in Role}
    lacking = [
        f"{fact.instance.url} lacks {', '.join(sorted(missing))}"
        for fact in reachable
        if (missing := wanted[fact.instance.role] - {model.name for model in fact.models})
    ]
    if lacking:
        yield fail("models", "; ".join(lacking), SAME_MODELS)
    else:
        models = ", ".join(sorted(every - adapters)) or "nothing"
        others = f", and the others than encode {', '.join(sorted(adapters))}" if adapters else ""
        yield ok("models", f"every instance serves {models}{others}")
    yield from _judge_lengths(reachable)


def _judge_lengths(reachable: Iterable[InstanceFacts]) -> Iterator[Finding]:
    lengths: dict[str, dict[int, list[str]]] = {}
    for fact in reachable:
        if fact.instance.role is Role.ENCODE:
            continue
        for model in fact.models:
            if model.max_model_len is not None:
                by_length = lengths.setdefault(model.name, {})
                by_length.setdefault(model.max_model_len, []).append(fact.instance.url)
    for name, by_length in lengths.items():
        if len(by_length) > 1:
            seen = "; ".join(f"{length}: {', '.join(by_length[length])}" for length in by_length)
            yield warn(
                "models",
                f"max_model_len of {name} differs: {seen}",
                "give prefill and decode instances the same --max-model-len",
            )


def judge_store(config: ProxyConfig, facts: StoreFacts | None) -> Iterator[Finding]:
    """Yield the findings about the store; `facts` is None if the proxy has no store."""
    if not config.encodes:
        return
    if facts is None:
        yield warn(
            "store",
            "the proxy has none: every item is encoded, even a repeated one",
            "set --ec-store to the store of the engines' --ec-transfer-config",
        )
        return
    if facts.problem is not None:
        repair = "repair it: until then every item of a request is encoded"
        yield fail("store", facts.problem, NO_STORE if facts.missing else repair)
        return
    if is_full(facts):
        yield fail(
            "store",
            f"its file system is full ({size_text(facts.free_bytes or 0)} are free): the entry "
            "that an encode instance just wrote was dropped",
            "delete other files there, or use a larger file system; the store evicts only its own "
            "entries",
        )
        return
    budget_s = config.ec_store_budget_s
    round_trip = f"{facts.round_trip_s * 1000:.1f} ms per lookup"
    if facts.round_trip_s > budget_s / 2:
        yield warn(
            "store",
            f"{round_trip}, of a budget of {budget_s * 1000:.0f} ms",
            "place it nearer to the proxy, or raise --ec-store-budget-s",
        )
    else:
        yield ok("store", round_trip)
    yield from _judge_entry(facts)
    if not facts.writable:
        yield warn(
            "store",
            "the proxy cannot write to it",
            "permit it: otherwise an item that two proxies see at once is encoded twice, and names "
            "for media are not kept",
        )
    yield from _judge_room(facts)
    if facts.mount is not None:
        yield from _judge_mount(facts.mount)


def is_full(facts: StoreFacts | None) -> bool:
    """Return whether the store lacks a new entry because its file system has no room."""
    if facts is None or facts.free_bytes is None or facts.entry != "missing":
        return False
    return facts.free_bytes < FULL_BYTES and facts.elsewhere is None


def _judge_entry(facts: StoreFacts) -> Iterator[Finding]:
    match facts.entry:
        case "read":
            yield ok("store", "has the entry that an encode instance just wrote")
        case "found":
            yield fail(
                "store",
                "the proxy cannot read the entry that an encode instance just wrote",
                "run engines and proxy as one user, or share a group: "
                "?dir_mode=2770&file_mode=0660 in every store URL",
            )
        case "missing" if facts.elsewhere is not None:
            yield fail(
                "store",
                "has the entry that an encode instance just wrote in another namespace than the "
                f"instance reports: {facts.elsewhere}",
                SPLIT,
            )
        case "missing":
            yield fail(
                "store",
                "does not have the entry that an encode instance just wrote",
                "name the same store in --ec-store and in the engines' --ec-transfer-config",
            )


def _judge_mount(mount: Mount) -> Iterator[Finding]:
    if mount.kind in NETWORK:
        yield warn(
            "store",
            f"it is on the {mount.kind} mount at {mount.path}, and network file systems are not "
            "tested",
            "use redis:// for several hosts, and shm:// or a local directory for one",
        )


def _judge_maxmemory(max_bytes: int | None, writing_bytes: int) -> Iterator[Finding]:
    if max_bytes is None:
        yield warn(
            "store",
            "Redis has no maxmemory: it grows until its machine has no memory left",
            "set maxmemory and maxmemory-policy volatile-lru",
        )
    elif max_bytes < 2 * writing_bytes:
        yield warn(
            "store",
            f"its maxmemory is {size_text(max_bytes)}, and writers may take "
            f"{size_text(writing_bytes)} of that from the entries",
            "raise maxmemory to that sum, or set max_entry_bytes in the store's URL to the largest "
            "encoder output",
        )


def _judge_room(facts: StoreFacts) -> Iterator[Finding]:
    if facts.writing_bytes is not None:
        yield from _judge_maxmemory(facts.max_bytes, facts.writing_bytes)
    if facts.max_bytes is None or facts.free_bytes is None:
        return
    room = facts.free_bytes + (facts.bytes or 0)
    if room < facts.max_bytes:
        yield warn(
            "store",
            f"its quota is {size_text(facts.max_bytes)}, but its file system has only "
            f"{size_text(room)} for it",
            "lower it with `ec-store configure URL --max-bytes SIZE` (max_bytes in a URL counts "
            "only when the store is created), or use a larger file system",
        )
