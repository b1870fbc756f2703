"""Load and host of an instance, parsed from its metrics page."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.routing.reports import (
    MAX_REQUESTS,
    MAX_SAMPLES,
    Host,
    KVMoved,
    Report,
    read_host,
    read_report,
)

REAL = Path(__file__).with_name("vllm_metrics.txt").read_bytes()
"""Metrics page of vLLM 0.32, shortened: three requests run."""

A = Host("shm+tls://a:8101", "aa", "cafe")
B = Host("shm+tls://b:8101", "bb", "cafe")


def page(*samples: str) -> bytes:
    return (
        "# HELP x y\n# TYPE x gauge\nother 1.0\n" + "\n".join(samples) + "\nmore 2.0\n"
    ).encode()


def gauges(running: object, waiting: object, engine: int = 0, model: str = "m") -> tuple[str, str]:
    labels = f'{{engine="{engine}",model_name="{model}"}}'
    return (
        f"vllm:num_requests_running{labels} {running}",
        f"vllm:num_requests_waiting{labels} {waiting}",
    )


def host_info(host: Host, value: float = 1.0, engine: int = 0) -> str:
    labels = f'address="{host.address}",arena="{host.arena}",tier="{host.tier}"'
    name = "vllm:ec_store_host_info"
    return f'{name}{{engine="{engine}",model_name="m",{labels}}} {value}'


def test_a_page_of_vllm_is_understood() -> None:
    assert read_report(REAL) == Report(
        waiting=0, running=3, engines={0: 3}, kv_tokens=524288, block_tokens=128
    )


def test_kv_transfers_of_all_engines_are_added() -> None:
    samples = [
        f'vllm:nixl_{name}{{engine="{engine}",model_name="m"}} {value}'
        for engine, values in enumerate(((3e8, 0.5), (1e8, 0.25)))
        for name, value in zip(
            ("bytes_transferred_sum", "xfer_time_seconds_sum"), values, strict=True
        )
    ]
    report = read_report(page(*gauges("1.0", "0.0"), *samples, "vllm:nixl_bytes_transferred 7"))

    assert report is not None
    assert report.kv_moved == KVMoved(4e8, 0.75)


@pytest.mark.parametrize("value", ["", "NaN?", "x"])
def test_invalid_kv_transfers_are_ignored(value: str) -> None:
    report = read_report(page(*gauges("1.0", "0.0"), f"vllm:nixl_bytes_transferred_sum {value}"))

    assert report is not None
    assert report.kv_moved == KVMoved()


def counters(generated: object, usage: object = 0.5, engine: int = 0) -> tuple[str, ...]:
    return (
        f'vllm:prompt_tokens_total{{engine="{engine}"}} 7.0',
        f'vllm:prompt_tokens_created{{engine="{engine}"}} 1.7e9',
        f'vllm:generation_tokens_total{{engine="{engine}"}} {generated}',
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {usage}',
    )


def progress_of(*samples: str) -> int | None:
    report = read_report(page(*gauges("1.0", "0.0"), *samples))
    assert report is not None
    return report.progress


def test_counters_of_tokens_show_progress() -> None:
    still, long_prefill = counters(5), counters(5, usage=0.6)

    assert progress_of(*counters(5)) == progress_of(*still, "vllm:e2e_request_latency_count 3")
    assert len({progress_of(*one) for one in (still, counters(6), long_prefill)}) == 3
    assert progress_of(*still, *counters(8, engine=1)) != progress_of(
        *still, *counters(9, engine=1)
    )


@pytest.mark.parametrize("samples", [(), ("vllm:kv_cache_usage_perc 0.5",)])
def test_a_page_without_counters_shows_no_progress(samples: tuple[str, ...]) -> None:
    assert progress_of(*samples) is None


def test_data_parallel_engines_are_read_separately() -> None:
    found = read_report(page(*gauges("3.0", "1.0"), *gauges("0.0", "12.0", engine=1)))

    assert found == Report(waiting=13, running=3, engines={0: 4, 1: 12})


def test_gauges_with_the_same_prefix_are_not_included() -> None:
    by_reason = 'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0'
    found = read_report(page(by_reason, *gauges("1.0", "2.0"), "vllm:num_requests_running_x 9"))

    assert found == Report(waiting=2, running=1, engines={0: 3})


def test_labels_are_in_any_order_and_may_be_none() -> None:
    model = 'a} b,engine=\\"7\\" c'
    samples = [
        f'vllm:num_requests_running{{model_name="{model}",engine="2"}} 1 1700000000000',
        f'vllm:num_requests_waiting{{engine="2",model_name="{model}"}} 1e1',
    ]
    assert read_report(page(*samples)) == Report(10, 1, {2: 11})
    bare = page("vllm:num_requests_running 1", "vllm:num_requests_waiting 0")
    assert read_report(bare) == Report(0, 1, {0: 1})


@pytest.mark.parametrize(
    "value",
    ["NaN", "-1", "-Inf", "+Inf", "1e300", f"{MAX_REQUESTS + 1}", "many", "", "0x3", "1_0_"],
)
def test_an_invalid_number_of_requests_is_not_a_report(value: str) -> None:
    assert read_report(page(*gauges(value, "1"))) is None
    assert read_report(page(*gauges("1", value))) is None
    assert read_report(page(*gauges("1", "1"), *gauges("1", value, engine=1))) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        page(),
        page(gauges(1, 1)[0]),
        page(gauges(1, 1)[1]),
        page(*gauges(1, 1), gauges(1, 1, engine=1)[0]),
        page('vllm:num_requests_running{model_name="' + "x" * 5000 + '"} 1', gauges(1, 1)[1]),
        page(*(line for engine in range(MAX_SAMPLES + 1) for line in gauges(1, 1, engine=engine))),
        b"\nvllm:num_requests_running",
        b"\nvllm:num_requests_running{",
    ],
)
def test_an_invalid_metrics_page_is_not_a_report(raw: bytes) -> None:
    assert read_report(raw) is None


@given(st.binary(), st.text(), st.booleans())
def test_any_page_is_read_or_rejected(raw: bytes, value: str, within: bool) -> None:
    made = page(*gauges(value, 1)) + raw if within else raw
    found = read_report(made)

    assert found is None or found.waiting + found.running == sum(found.engines.values())


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        ([host_info(A)], A),
        ([host_info(A), host_info(A, engine=1)], A),
        ([host_info(A), host_info(B, engine=1)], None),
        ([host_info(A, 0), host_info(B)], B),
        ([host_info(A, 0)], None),
        ([], None),
        ([host_info(A._replace(tier=""))], A._replace(tier="")),
        ([host_info(A._replace(address="http://a:1"))], None),
        ([host_info(A._replace(address="shm+tls://a/path"))], None),
        ([host_info(A._replace(arena="not hex"))], None),
        ([host_info(A), "vllm:ec_store_host_info{} 1"], None),
    ],
)
def test_the_common_server_of_all_engines_is_read(lines: list[str], host: Host | None) -> None:
    assert read_host(page(*lines)) == host


@given(st.binary(max_size=300))
def test_any_bytes_about_a_host_are_no_error(garbage: bytes) -> None:
    read_host(b"\nvllm:ec_store_host_info{" + garbage + b"} 1\n")


def test_outputs_are_readable_at_their_host_and_through_a_shared_tier() -> None:
    alone, other = A._replace(tier=""), B._replace(tier="")

    assert A.reaches(A._replace(arena="restarted", tier=""))
    assert A.reaches(B)
    assert not alone.reaches(other)
    assert not A.reaches(B._replace(tier="other"))
