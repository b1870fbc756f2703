import json
import math
from collections import Counter
from typing import cast, get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import Stage
from epd.events import InstanceChanged
from epd.ui import formats
from epd.ui import recent as kept
from epd.ui.recent import SHOWN_SPANS, SHOWN_TEXT, InstanceState, Recent, Snapshot
from epd.ui.state import (
    FLOWS,
    SPARK_S,
    Looked,
    Moment,
    Totals,
    UiState,
    metric_totals,
    quantile,
    state,
)
from tests.ui.states import CAUSES, NOW_S, UNIX_S, Clock, done, engine, families, large, stage

NOW = Moment(NOW_S, UNIX_S)
E = "http://e:1"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recent(clock: Clock) -> Recent:
    return Recent(clock, clock.unix)


def known(recent: Recent, *instances: InstanceState) -> Snapshot:
    """Return the snapshot as another process reads it."""
    read: Snapshot = orjson.loads(orjson.dumps(recent.snapshot(list(instances))))
    return read


def shown(*snapshots: Snapshot) -> UiState:
    return state(snapshots, metric_totals(families()), "redis", NOW)


def seen(condition: str, requests: int = 0, role: str = "encode") -> InstanceState:
    return InstanceState(
        role=role,
        url=E,
        state=condition,
        cause=CAUSES.get(condition, ""),
        requests=requests,
        prompt_tokens=10 * requests,
        prefix_tokens=requests,
        precise=bool(requests),
        kv_bytes_per_s=1e9 * requests or None,
        writes=bool(requests),
    )


def test_every_stage_of_a_request_is_shown_or_is_the_proxys_own() -> None:
    assert {*FLOWS, "proxy"} == set(get_args(Stage))


def test_a_request_is_shown_with_when_its_stages_began(recent: Recent, clock: Clock) -> None:
    encode = stage("encode", E, NOW_S - 0.9, 0.2)
    decode = stage("decode", "http://d:1", NOW_S - 0.6, 0.1, "decode_failed")
    recent.request_done(done("one", encode, decode, seconds=1.0, error="decode_failed"))
    [one] = shown(known(recent))["requests"]

    assert (one["id"], one["ended_s"], one["seconds"]) == ("one", 1e9, 1.0)
    assert [(span["stage"], span["after_s"], span["error"]) for span in one["spans"]] == [
        ("encode", 0.1, None),
        ("decode", 0.4, "decode_failed"),
    ]


def test_requests_of_all_workers_are_shown_the_last_first(clock: Clock) -> None:
    workers = Recent(clock, clock.unix), Recent(clock, clock.unix)
    for number in range(6):
        clock.now_s += 1
        workers[number % 2].request_done(done(str(number), error="encode_failed"))
    document = shown(*map(known, workers))

    assert [one["id"] for one in document["requests"]] == list("543210")
    assert [one["what"] for one in document["notices"]] == list("543210")
    assert document["workers"] == 2


def test_a_reported_time_does_not_change_when_clocks_drift(recent: Recent, clock: Clock) -> None:
    clock.now_s = NOW_S - 3.05
    recent.request_done(done("one", error="encode_failed"))
    recent.instance_changed(InstanceChanged(E, "encode", "down"))
    looks = [
        state([known(recent)], metric_totals(families()), None, Moment(NOW_S, UNIX_S + drift_s))
        for drift_s in (-0.002, 0.002)
    ]

    assert looks[0]["requests"] == looks[1]["requests"]
    assert looks[0]["notices"] == looks[1]["notices"]


def test_no_bad_requests_push_out_an_instance_that_went(clock: Clock) -> None:
    workers = Recent(clock, clock.unix), Recent(clock, clock.unix)
    workers[0].instance_changed(InstanceChanged(E, "encode", "down"))
    for number in range(1000):
        clock.now_s += 1
        workers[number % 2].request_done(done(str(number), error="invalid_request"))
    notices = shown(*map(known, workers))["notices"]

    assert [one["message"] for one in notices if one["what"] == E] == ["down"]
    assert len(notices) == kept.KEPT_ERRORS + 1
    assert notices[-1]["what"] == E


def test_requests_to_the_proxy_itself_are_not_shown(recent: Recent) -> None:
    for path in ("/metrics", "/ui/state", "unknown", "/v1/models"):
        recent.request_done(done(path=path, error="unknown_route"))
    document = shown(known(recent))

    assert document["requests"] == []
    assert document["notices"] == []
    assert sum(one["requests"] for one in document["seconds"]) == 0


def test_recent_events_are_bounded(recent: Recent, clock: Clock) -> None:
    spans = [stage("encode", E, clock.now_s, 0.1)] * 100
    for number in range(3000):
        clock.now_s += 1
        recent.stage_done(spans[0])
        broken = done(str(number), *spans, error="x", reason="long " * 1000, stream=True)
        recent.request_done(broken)
        recent.instance_changed(InstanceChanged(E, "encode", "down"))
    events = recent.snapshot([])

    assert len(events["samples"]["encode"]) == kept.KEPT_SAMPLES
    assert len(events["requests"]) == kept.KEPT_REQUESTS
    assert Counter(one["kind"] for one in events["notices"]) == {
        "request": kept.KEPT_ERRORS,
        "instance": kept.KEPT_CHANGES,
    }
    assert len(events["seconds"]) == kept.KEPT_SECONDS
    assert len(events["answers"]) == kept.KEPT_SAMPLES
    assert len(events["requests"][0]["spans"]) == SHOWN_SPANS
    assert events["requests"][0]["more_spans"] == 100 - SHOWN_SPANS
    assert max(len(one["more"]) for one in events["notices"]) == SHOWN_TEXT


def test_rates_are_of_the_last_ten_seconds_of_all_workers(clock: Clock) -> None:
    workers = Recent(clock, clock.unix), Recent(clock, clock.unix)
    for worker in workers:
        for ago_s in (1, 2, 3, 20, 200):
            worker.stage_done(stage("encode", E, NOW_S - ago_s - 0.1, 0.1))
    document = shown(*(known(worker, seen("healthy")) for worker in workers))
    encode = next(one for one in document["stages"] if one["stage"] == "encode")

    assert (encode["rate"], encode["count"]) == (0.6, 10)
    assert document["instances"][0]["rate"] == 0.6


def test_a_rate_is_right_where_the_ring_reaches_back_less_far(recent: Recent) -> None:
    for number in range(2000):
        recent.stage_done(stage("decode", "http://d:1", NOW_S - 2 + number / 1000, 0.0))
    decode = next(one for one in shown(known(recent))["stages"] if one["stage"] == "decode")

    assert 900 < decode["rate"] < 1100


def test_old_and_failed_requests_are_in_no_quantile(recent: Recent) -> None:
    recent.stage_done(stage("encode", E, NOW_S - 400, 9.0))
    recent.stage_done(stage("encode", E, NOW_S - 5, 5.0, "encode_timeout"))
    recent.stage_done(stage("encode", E, NOW_S - 1, 0.5))
    [one] = shown(known(recent, seen("healthy")))["instances"]

    assert (one["p50_s"], one["p99_s"], one["failed"], one["count"]) == (0.5, 0.5, 1, 2)


def test_rejected_requests_are_not_counted_as_failures_of_an_instance(recent: Recent) -> None:
    rejected = stage("encode", E, NOW_S - 3, 0.1, "encode_rejected")
    recent.stage_done(rejected._replace(rejected=True))
    recent.stage_done(stage("encode", E, NOW_S - 2, 0.1, "encode_failed"))
    recent.stage_done(stage("encode", E, NOW_S - 1, 0.1, "cancelled"))
    document = shown(known(recent, seen("healthy")))
    [one] = document["instances"]
    encode = next(one for one in document["stages"] if one["stage"] == "encode")

    for latency in (one, encode):
        assert (latency["failed"], latency["rejected"], latency["count"]) == (1, 1, 3)


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, "ok"),
        (400, "encode_rejected", "rejected"),
        (404, "decode_rejected", "rejected"),
        (429, "queue_full", "rejected"),
        (499, "client_closed", "left"),
        (502, "decode_failed", "failed"),
        (200, "decode_died", "failed"),
    ],
)
def test_rejected_and_failed_requests_are_counted_separately(
    recent: Recent, clock: Clock, status: int, error: str | None, outcome: str
) -> None:
    clock.now_s = NOW_S - 3.5
    recent.request_done(done(status=status, error=error))
    document = shown(known(recent))
    totals = {
        name: sum(cast("dict[str, int]", one)[name] for one in document["seconds"])
        for name in ("requests", "failed", "rejected")
    }

    assert [one["outcome"] for one in document["requests"]] == [outcome]
    assert [one["outcome"] for one in document["notices"]] == [outcome] * (error is not None)
    assert totals == {
        "requests": 1,
        "failed": outcome == "failed",
        "rejected": outcome == "rejected",
    }


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("healthy", "healthy"), "healthy"),
        (("trial", "healthy"), "trial"),
        (("healthy", "ejected"), "ejected"),
        (("down", "ejected"), "down"),
    ],
)
def test_the_worst_state_of_several_workers_is_shown(
    recent: Recent, states: tuple[str, ...], expected: str
) -> None:
    [one] = shown(*(known(recent, seen(condition, 2)) for condition in states))["instances"]

    assert (one["state"], one["requests"]) == (expected, 4)
    assert one["cause"] == CAUSES.get(expected, "")
    assert (one["prompt_tokens"], one["prefix_tokens"]) == (40, 4)


@pytest.mark.parametrize(
    ("requests", "expected"), [((0, 0), None), ((0, 2), 2e9), ((3, 0), 3e9), ((3, 2), 3e9)]
)
def test_the_kv_bandwidth_is_the_highest_that_a_worker_has_read(
    recent: Recent, requests: tuple[int, ...], expected: float | None
) -> None:
    [one] = shown(*(known(recent, seen("healthy", count)) for count in requests))["instances"]

    assert one["kv_bytes_per_s"] == expected


@pytest.mark.parametrize("requests", [0, 2])
def test_the_cache_is_reported_only_if_every_worker_has_it(recent: Recent, requests: int) -> None:
    [one] = shown(*(known(recent, seen("healthy", count)) for count in (2, requests)))["instances"]

    assert one["precise"] is bool(requests)


def test_an_instance_encodes_too_if_a_worker_has_read_it(recent: Recent) -> None:
    workers = [known(recent, seen("healthy", n, role="prefill_decode")) for n in (0, 1)]
    document = shown(*workers)

    assert [one["name"] for one in document["instances"]] == ["EPD1"]
    assert document["topology"] == "1epd"


def test_one_url_in_two_roles_is_two_instances(recent: Recent) -> None:
    recent.stage_done(stage("encode", E, NOW_S - 1, 0.1))
    document = shown(known(recent, seen("healthy"), seen("down", role="prefill_decode")))

    assert [(one["role"], one["state"], one["count"]) for one in document["instances"]] == [
        ("encode", "healthy", 1),
        ("prefill_decode", "down", 0),
    ]


def test_seconds_are_a_whole_minute_with_nothing_left_out(clock: Clock) -> None:
    workers = Recent(clock, clock.unix), Recent(clock, clock.unix)
    clock.now_s = NOW_S - 3.5
    for worker in workers:
        worker.request_done(done())
    seconds = shown(*map(known, workers))["seconds"]

    assert len(seconds) == SPARK_S
    assert [one["at_s"] for one in seconds] == list(range(10**9 - SPARK_S, 10**9))
    [busy] = [one for one in seconds if one["requests"]]
    assert (busy["at_s"], busy["requests"], busy["hit"], busy["encoded"]) == (10**9 - 4, 2, 2, 2)


def test_totals_are_those_of_the_page_of_metrics() -> None:
    found = metric_totals(families())

    assert (found["requests"], found["failed"], found["rejected"]) == (916, 4, 7)
    assert found["items"] == {"hit": 830, "encoded": 170, "local": 0}
    assert found["media"] == {"metadata": 930, "raw": 70}
    assert found["in_flight"] == 12
    assert found["saved"] == {"encodes": 830, "bytes": 312_400_000, "encode_seconds": 148.2}
    assert found["conversations"] == {"kept": 12, "turns": 60, "hit": 45}


NONE = {"hit": 0, "encoded": 0, "local": 0}
NO_MEDIA = {"metadata": 0, "raw": 0}
NO_TURNS = {"kept": 0, "turns": 0, "hit": 0}
SAVED = "Saved 830 encodes, 312 MB of media not sent, about 148 s of encoding. Hit rate 83 %"
MEDIA = "; 93 % of media sent as metadata, 70 raw."
TURNS = "Of 60 turns, 75 % reused decode's KV blocks; 12 conversations kept."
NO_WORK = {"encodes": 0, "bytes": 0, "encode_seconds": 0.0}


@pytest.mark.parametrize(
    ("totals", "role", "expected"),
    [
        ({}, "encode", f"{SAVED}{MEDIA} {TURNS}"),
        ({}, "decode", f"{SAVED}{MEDIA} {TURNS}"),  # it had encode instances before
        ({"items": NONE}, "encode", TURNS),
        ({"conversations": NO_TURNS, "media": NO_MEDIA}, "encode", f"{SAVED}."),
        (
            {"items": NONE, "saved": NO_WORK, "media": NO_MEDIA, "conversations": NO_TURNS},
            "encode",
            "Saved 0 encodes. Hit rate -.",
        ),
        ({"items": NONE, "conversations": NO_TURNS}, "decode", ""),
        (
            {"items": NONE, "conversations": {"kept": 0, "turns": 1, "hit": 0}},
            "decode",
            "Of 1 turn, 0 % reused decode's KV blocks.",
        ),
        (
            {"conversations": NO_TURNS, "quarantined": 2},
            "encode",
            f"{SAVED}{MEDIA} In quarantine: 2 tenants with requests that ended instances.",
        ),
    ],
)
def test_the_summary_names_what_was_saved(
    recent: Recent, totals: dict[str, object], role: str, expected: str
) -> None:
    found = cast("Totals", {**metric_totals(families()), **totals})
    document = state([known(recent, seen("healthy", role=role))], found, None, NOW)

    assert " ".join("".join(parts) for parts in document["summary"]) == expected
    for parts in document["summary"]:
        assert all(figure[0] in "0123456789-" for figure in parts[1::2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.0004, "0.40 ms"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (148.2, "148 s")],
)
def test_durations(value: float | None, expected: str) -> None:
    assert formats.seconds_text(value) == expected


def test_figures() -> None:
    assert formats.bytes_text(312_400_000) == "312 MB"
    assert formats.bytes_text(0) == "0 B"
    assert formats.share_text(83, 100) == "83 %"
    assert formats.share_text(0, 0) == "-"


def test_instances_have_names_and_the_fleet_a_topology() -> None:
    document = large(2)

    assert [one["name"] for one in document["instances"]] == ["E1", "E2", "P1", "P2", "D1", "D2"]
    assert document["topology"] == "2e2p2d"


def test_rates_and_durations_are_those_of_the_last_requests() -> None:
    document = large(1)

    assert (document["per_s"], document["minute"]["requests"]) == (1.0, 60)
    assert document["minute"]["failed"] == sum(one["failed"] for one in document["seconds"])
    whole, first = document["answered"], document["first_token"]
    assert (whole["count"], whole["p50_s"], whole["p90_s"]) == (62, 0.5, 0.5)
    assert (first["count"], first["p50_s"], first["p90_s"]) == (62, 0.2, 0.2)


def test_only_streams_have_a_time_to_the_first_token(recent: Recent, clock: Clock) -> None:
    for ago_s, stream, seconds, error in (
        (400.0, True, 9.0, None),  # too long ago
        (9.5, False, 8.0, None),
        (8.5, True, 0.3, None),
        (7.5, True, 0.1, "decode_died"),  # after its first token
        (6.5, True, None, "decode_failed"),  # before it
        (2.5, True, 0.2, None),
    ):
        clock.now_s = NOW_S - ago_s
        recent.request_done(done(error=error, stream=stream, first_token_s=seconds, seconds=4.0))
    document = shown(known(recent))
    first, whole = document["first_token"], document["answered"]

    assert (first["count"], first["p50_s"], first["p90_s"]) == (3, 0.2, 0.3)
    assert (whole["count"], whole["p50_s"], whole["p90_s"]) == (3, 4.0, 4.0)
    # Each point of the graph is the median of five seconds, of which the last is the newest.
    assert len(first["history"]) == SPARK_S
    assert first["history"][-9:] == [0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]


def test_a_fleet_without_requests_has_no_durations() -> None:
    document = shown()

    assert document["first_token"] == {
        "count": 0,
        "p50_s": None,
        "p90_s": None,
        "history": [None] * SPARK_S,
    }


def test_an_instance_has_the_report_of_its_engine_and_others_none(recent: Recent) -> None:
    report = engine(4)
    instances = [seen("healthy"), seen("healthy", role="decode")]
    instances[1]["url"] = "http://d:1"
    looked = Looked(engines={"http://d:1": report})
    document = state([known(recent, *instances)], metric_totals([]), None, NOW, looked)
    unknown, decode = cast("list[dict[str, object]]", document["instances"])

    assert {name: decode[name] for name in report} == report
    assert {unknown[name] for name in report} == {None}


def test_an_empty_fleet_has_a_state() -> None:
    document = state([], metric_totals([]), None, NOW)

    assert (document["instances"], document["store"]) == ([], None)
    assert document["totals"]["saved"]["encode_seconds"] == 0


@given(
    st.lists(st.floats(0, 1e6), min_size=1).map(sorted),
    st.floats(0.01, 1.0),
)
def test_a_quantile_is_one_of_them_that_so_many_are_not_above(
    ordered: list[float], share: float
) -> None:
    found = quantile(ordered, share)

    assert found in ordered
    assert sum(value <= found for value in ordered) >= math.floor(share * len(ordered))


def test_a_large_fleet_is_small_enough_to_be_sent_each_second() -> None:
    document = large(20)

    assert Counter(one["role"] for one in document["instances"]) == {
        "encode": 20,
        "prefill": 20,
        "decode": 20,
    }
    assert len(json.dumps(document)) < 150_000
