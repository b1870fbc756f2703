"""Findings that the doctor derives from facts."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.config import ProxyConfig
from epd.routing.instances import Instance, Role
from epd.tools.doctor import checks
from epd.tools.doctor.checks import judge, judge_trials
from epd.tools.doctor.facts import (
    InstanceFacts,
    ModelFacts,
    Mount,
    Preparation,
    StoreFacts,
    Trial,
)
from epd.tools.doctor.findings import (
    FAIL,
    OK,
    WARN,
    Finding,
    Verdict,
    as_json,
    as_text,
    worst_verdict,
)
from epd.tools.doctor.host import SOMAXCONN, read_host
from epd.tools.doctor.instances import read_preparation
from epd.tools.doctor.store import mount_of
from tests.small_disk import small_disk

E = Instance(Role.ENCODE, "http://e")
PD = Instance(Role.PREFILL_DECODE, "http://pd")


def facts(instance: Instance = E, **changes: Any) -> InstanceFacts:
    about: dict[str, Any] = {"version": "0.33.0", "models": (ModelFacts("m", 4096),)}
    return InstanceFacts(instance, **about | changes)


def config(**changes: Any) -> ProxyConfig:
    urls = {"encode_servers_urls": (E.url,), "decode_servers_urls": (PD.url,)}
    return ProxyConfig(**urls | changes)


def judge_instance(facts: InstanceFacts) -> list[Finding]:
    return [*judge(checks.INSTANCE, facts, facts.name), *judge_trials(facts)]


def judge_fleet(fleet: Sequence[InstanceFacts]) -> list[Finding]:
    usable: Sequence[InstanceFacts] = [one for one in fleet if one.problem is None]
    return [*judge(checks.FLEET, usable)]


def judge_store(**found: Any) -> list[Finding]:
    return [*judge(checks.STORE, StoreFacts(budget_s=0.02, **found), "store")]


def judge_host(config: ProxyConfig, **changes: Any) -> list[Finding]:
    return [*judge(checks.HOST, read_host(config)._replace(**changes))]


def bad(findings: Any) -> list[Finding]:
    return [one for one in findings if one.verdict is not OK]


@pytest.mark.parametrize(
    ("changes", "verdict", "seen"),
    [
        ({"problem": "it cannot be reached"}, FAIL, "it cannot be reached"),
        ({"version": "0.31.2"}, WARN, "reports no ec_transfer_params"),
        ({"skew_s": -7.2}, WARN, "-7 s"),
        ({"trials": {"encode": Trial("refused", 400)}}, FAIL, "encode: refused"),
    ],
)
def test_a_finding_about_an_instance_states_the_change(
    changes: dict[str, Any], verdict: Verdict, seen: str
) -> None:
    [finding] = bad(judge_instance(facts(**changes)))

    assert finding.verdict is verdict
    assert seen in finding.seen
    assert finding.subject == "encode http://e"
    assert finding.advice


@pytest.mark.parametrize(
    ("preparation", "verdict", "seen", "advice"),
    [
        (Preparation(1, "cpu", "cuda", ()), WARN, "one API server", "--api-server-count"),
        (
            Preparation(4, "cpu", "cuda", ()),
            OK,
            "4 API servers",
            "--mm-tensor-ipc torch_shm",
        ),
        (Preparation(1, "cuda", "cuda", ()), OK, "the processor on cuda", ""),
        (Preparation(1, "cpu", "cpu", ()), OK, "one API server", ""),
    ],
)
def test_an_encode_instance_should_not_keep_its_device_waiting(
    preparation: Preparation, verdict: Verdict, seen: str, advice: str
) -> None:
    _, finding = judge_instance(facts(preparation=preparation))

    assert (finding.verdict, seen in finding.seen) == (verdict, True)
    assert advice in finding.advice
    assert bool(advice) is bool(finding.advice)


@pytest.mark.fault(106)
def test_instances_that_name_one_item_by_several_keys_are_a_finding() -> None:
    videos, none = (Preparation(1, "cuda", "cuda", kinds) for kinds in (("video",), ()))
    other = Instance(Role.ENCODE, "http://f")
    fleets = [
        [facts(preparation=videos), facts(PD, preparation=none), facts(other, preparation=videos)],
        [facts(preparation=videos), facts(PD, preparation=videos)],
        [facts(preparation=none), facts(PD)],
    ]

    [finding], *others = [bad(judge_fleet(fleet)) for fleet in fleets]
    assert finding.seen == "none at http://pd; video at http://e, http://f"
    assert "--mm-processor-device cpu" in finding.advice
    assert others == [[], []]


@given(st.binary(max_size=200))
def test_a_page_without_a_valid_preparation_has_none(text: bytes) -> None:
    name = b"vllm:ec_store_preparation_info"

    assert read_preparation(name + text) is None
    assert read_preparation(b"\n" + name + b'{api_servers="x"} 1.0\n' + text) is None


@pytest.mark.parametrize("free_bytes", [2**24 - 1, 2**24])
def test_a_full_file_system_is_the_only_finding_about_the_store(free_bytes: int) -> None:
    store: Any = {"entry": "missing", "bytes": 1, "max_bytes": 2**40, "free_bytes": free_bytes}
    full = StoreFacts(0.02, **store).is_full
    findings = bad(judge_store(**store))

    assert full is (free_bytes < 2**24)
    assert len(findings) == (1 if full else 2)
    assert ("its file system is full (16.0 MiB are free)" in findings[0].seen) is full


@pytest.mark.parametrize("version", ["0.32.0", "1.0.0", "0.33.1rc1", "0.1.dev2+gabc", None, "?"])
def test_a_recent_or_unknown_version_is_not_a_finding(version: str | None) -> None:
    assert bad(judge_instance(facts(version=version))) == []


def test_adapters_are_expected_of_all_instances_but_encode_instances() -> None:
    served = (ModelFacts("m"), ModelFacts("lora", parent="m"))
    other = Instance(Role.PREFILL_DECODE, "http://pd2")
    fleet = [facts(), facts(PD, models=served), facts(other, models=served)]
    lacking = [*fleet[:2], facts(other)]

    assert bad(judge_fleet(fleet)) == []
    [finding] = bad(judge_fleet(lacking))
    assert finding.seen == "http://pd2 lacks lora"


def test_consumers_with_other_lengths_are_named_and_encode_instances_may_have_any() -> None:
    other = Instance(Role.PREFILL_DECODE, "http://pd2")
    fleet = [facts(models=(ModelFacts("m", 1),)), facts(PD), facts(other)]
    assert bad(judge_fleet(fleet)) == []

    fleet[2] = facts(other, models=(ModelFacts("m", 8192),))
    [finding] = bad(judge_fleet(fleet))

    assert finding.seen == "max_model_len of m differs: 4096 at http://pd; 8192 at http://pd2"


def test_several_versions_and_several_namespaces_are_named() -> None:
    fleet = [
        facts(namespaces=frozenset({"a:1"})),
        facts(Instance(Role.ENCODE, "http://e2"), namespaces=frozenset({"b:2"})),
    ]
    [namespaces] = bad(judge_fleet(fleet))
    [versions] = bad(judge_fleet([facts(), facts(PD, version="0.32.0")]))

    seen = "a:1 at http://e; b:2 at http://e2"
    assert (namespaces.verdict, namespaces.seen) == (FAIL, seen)
    assert (versions.verdict, versions.seen) == (WARN, "0.32.0 at http://pd; 0.33.0 at http://e")


def test_one_instance_with_several_namespaces_has_one_finding() -> None:
    fleet = [facts(namespaces=frozenset({"a:1", "a:2"})), facts(PD, namespaces=frozenset({"a:2"}))]
    [finding] = bad(
        [*judge_fleet(fleet), *(found for one in fleet for found in judge_instance(one))]
    )

    assert (finding.subject, finding.verdict) == ("encode http://e", FAIL)
    assert finding.seen == "has several namespaces: a:1, a:2"
    assert "config.json" in finding.advice


@pytest.mark.parametrize(
    ("trial", "advice"),
    [
        (Trial("Not Found", 404), "Whisper"),
        (Trial("The model `m` does not exist.", 404), "--ec-transfer-config"),
        (Trial("refused", 400), "--ec-transfer-config"),
    ],
)
def test_a_model_without_a_chat_route_has_separate_advice(trial: Trial, advice: str) -> None:
    [finding] = bad(judge_instance(facts(trials={"encode": trial})))

    assert advice in finding.advice


def test_an_instance_that_cannot_be_reached_is_not_compared_with_others() -> None:
    assert bad(judge_fleet([facts(), facts(PD, problem="away", models=(), version=None)])) == []


def mount(kind: str) -> Mount | None:
    return mount_of(PurePosixPath("/mnt/ec"), [("x", "/mnt", kind, "rw")])


@pytest.mark.parametrize(
    ("store", "verdict", "seen"),
    [
        ({"is_configured": False}, WARN, "the proxy has none"),
        ({"problem": "full"}, FAIL, "full"),
        ({"round_trip_s": 0.011}, WARN, "11.0 ms per lookup, of a budget of 20 ms"),
        ({"is_writable": False}, WARN, "cannot write"),
        ({"entry": "missing"}, FAIL, "does not have the entry"),
        ({"entry": "found"}, FAIL, "cannot read the entry"),
        ({"writing_bytes": 2**20}, WARN, "no maxmemory"),
        (
            {"writing_bytes": 2**30, "max_bytes": 2**31 - 1},
            WARN,
            "writers may take 1.0 GiB",
        ),
        ({"mount": mount("nfs4")}, WARN, "nfs4 mount at /mnt"),
    ],
)
def test_a_finding_about_the_store_states_the_change(
    store: dict[str, Any], verdict: Verdict, seen: str
) -> None:
    [finding] = bad(judge_store(**store))

    assert finding.verdict is verdict
    assert seen in finding.seen
    assert finding.advice


def test_a_maxmemory_with_room_for_entries_and_writers_is_right() -> None:
    store: Any = {"writing_bytes": 2**30, "max_bytes": 2**31}

    assert bad(judge_store(**store)) == []


def test_a_quota_above_the_room_is_lowered_where_it_is_in_force() -> None:
    store: Any = {"bytes": 2**30, "max_bytes": 64 * 2**30, "free_bytes": 9 * 2**30}

    [finding] = bad(judge_store(**store))

    assert finding.seen == "its quota is 64.0 GiB, but its file system has only 10.0 GiB for it"
    assert "ec-store configure" in finding.advice
    assert "--max-bytes" in finding.advice


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_local_file_system_is_not_a_finding(kind: str) -> None:
    assert bad(judge_store(mount=mount(kind))) == []


TABLE = [
    ("/dev/vda", "/", "ext4", "rw,relatime"),
    ("nas:/ec", "/mnt/ec", "ceph", "rw"),
    ("tmpfs", "/mnt/ec/in memory", "tmpfs", "rw"),
    ("tmpfs", "/mnt", "tmpfs", "rw"),
    ("nas:/new", "/mnt/ec", "nfs4", "rw,vers=4.2"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/mnt/ecology", "tmpfs"),
        ("/mnt/ec", "nfs4"),
        ("/mnt/ec/store", "nfs4"),
        ("/mnt/ec/in memory/store", "tmpfs"),
    ],
)
def test_mount_of_a_path_is_the_last_of_the_nearest(path: str, kind: str) -> None:
    found = mount_of(PurePosixPath(path), TABLE)

    assert found is not None
    assert found.kind == kind


@given(st.text(), st.lists(st.tuples(*[st.text(max_size=8)] * 4), max_size=4))
def test_no_mount_table_raises(path: str, table: list[tuple[str, str, str, str]]) -> None:
    mount_of(PurePosixPath("/" + path), table)


def test_mount_of_a_path_is_found_in_the_systems_table(tmp_path: Path) -> None:
    with small_disk(tmp_path / "in memory", "1m") as disk:
        if disk.path != disk.mounted:
            pytest.skip("the mount is in the table of another process")
        found = mount_of(PurePosixPath(disk.path / "store"), psutil.disk_partitions(all=True))

    assert found is not None
    assert (str(found.path), found.kind) == (str(disk.path), "tmpfs")


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"keep_alive_s": 60}, "keep-alive"),
        ({"max_requests": 10**9}, "descriptors"),
        ({"allowed_local_media_path": "/nowhere"}, "media"),
        ({"api_keys_file": "keys"}, "access"),
        ({"host": "192.0.2.1"}, "access"),
        ({"host": "localhost", "uds": "/run/epd/s"}, "access"),
        ({"host": "localhost", "allowed_origins": ("*",)}, "access"),
        ({"allowed_media_domains": ()}, "media"),
    ],
)
def test_settings_that_will_cause_trouble_are_found_without_an_instance(
    changes: dict[str, Any], subject: str
) -> None:
    of_machine = {"somaxconn": 4096, "has_forward_proxy": False}
    sound = {
        "host": "127.0.0.1",
        "media_fetch": "proxy",
        "allowed_media_domains": ("example.com",),
        "max_requests": 64,
    }
    before = {one.subject for one in judge_host(config(**sound), **of_machine)}
    after = {one.subject for one in judge_host(config(**sound | changes), **of_machine)}

    assert (before, after) == (set(), {subject})


@pytest.mark.parametrize("trusted", [True, False])
def test_a_forward_proxy_that_media_do_not_use_is_found(
    monkeypatch: pytest.MonkeyPatch, *, trusted: bool
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    settings = {
        "media_fetch": "proxy",
        "allowed_media_domains": ("example.com",),
        "media_fetch_trust_env": trusted,
    }
    found = [one for one in bad(judge_host(config(**settings))) if one.subject == "media"]

    assert ["--media-fetch-trust-env" in one.advice for one in found] == [True] * (not trusted)


@pytest.mark.parametrize(
    ("host", "is_found"),
    [("localhost", False), ("::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", True)],
)
def test_an_address_of_this_machine_alone_needs_no_admin_key(host: str, *, is_found: bool) -> None:
    subjects = {finding.subject for finding in bad(judge_host(config(host=host)))}

    assert ("access" in subjects) == is_found


@pytest.mark.fault(72)
@pytest.mark.parametrize(
    ("somaxconn", "is_found"), [(128, True), (1023, True), (1024, False), (None, False)]
)
def test_a_kernel_that_holds_few_connections_is_found(
    somaxconn: int | None, *, is_found: bool
) -> None:
    findings = judge_host(config(), somaxconn=somaxconn)
    found = [one for one in findings if one.subject == "backlog"]

    assert bool(found) is is_found
    for one in found:
        assert f"queues {somaxconn} connections" in one.seen
        assert "sysctl -w net.core.somaxconn=4096" in one.advice


@pytest.mark.fault(72)
@pytest.mark.skipif(not SOMAXCONN.exists(), reason="not Linux")
def test_the_doctor_reads_the_backlog_of_this_machine() -> None:
    assert read_host(config()).somaxconn == int(SOMAXCONN.read_text())


FINDINGS = st.lists(
    st.builds(
        Finding,
        st.sampled_from(Verdict),
        st.text(max_size=9),
        st.text(max_size=9),
        st.text(max_size=9),
    )
)


@given(FINDINGS)
def test_the_worst_finding_decides(findings: list[Finding]) -> None:
    verdicts = {one.verdict for one in findings}
    expected = next((it for it in reversed(Verdict) if it in verdicts), OK)

    assert worst_verdict(findings) is expected
    assert f'"verdict": "{expected}"' in as_json(findings)


def test_text_output_has_the_advice_below_the_finding() -> None:
    text = as_text([Finding(OK, "a", "fine"), Finding(WARN, "bcd", "so so", "mend it")])

    assert text.splitlines() == [
        "ok    a    fine",
        "warn  bcd  so so",
        "           -> mend it",
        "",
        "1 ok, 1 warn, 0 fail",
    ]
