"""Each alert fires in its own case, and does not fire in a similar harmless case. Uses promtool."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import PROMETHEUS, promtool, rules

Series = dict[str, str]
"""Values by series in promtool's notation: `1+2x3` is 1, 3, 5, 7, one minute apart."""

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
P = 'job="epd", instance="p1:8000"'
S = 'job="ec-store", instance="s1:8100"'
V = 'job="vllm", instance="d1:8000", role="decode", model_name="m", engine="0"'
CHAT = 'path="/v1/chat/completions", model_name="m"'
E1 = 'role="encode", exported_instance="http://e1"'
E2 = 'role="encode", exported_instance="http://e2"'
BEFORE = 8 * 60


@dataclass(frozen=True)
class Case:
    """Series that make an alert fire within `minutes`, and similar series that do not.

    Attributes:
        labels: further labels of the alert that fires, in addition to its name and severity.
    """

    fires: Series
    quiet: Series
    minutes: int = 30
    labels: dict[str, str] = field(default_factory=dict)


def requests(failed: int, ok: int, status: str = "500") -> Series:
    """Return series with `failed` and `ok` requests per minute."""
    return {
        f'epd_requests_total{{{P}, {CHAT}, status="{status}"}}': f"0+{failed}x60",
        f'epd_requests_total{{{P}, {CHAT}, status="200"}}': f"0+{ok}x60",
    }


def histogram(name: str, labels: str, slow: int, fast: int, limit: str) -> Series:
    """Return a histogram with `slow` values above and `fast` values below `limit` per minute.

    The limit must be the upper bound of a bucket.
    """
    rates = {limit: fast, "300": fast + slow, "+Inf": fast + slow}
    return {
        f'{name}_bucket{{{P}, {labels}le="{le}"}}': f"0+{rate}x60" for le, rate in rates.items()
    }


def stage(failed: int, ok: int) -> Series:
    return {
        f'epd_stage_seconds_count{{{P}, stage="encode", failed="true"}}': f"0+{failed}x60",
        f'epd_stage_seconds_count{{{P}, stage="encode", failed="false"}}': f"0+{ok}x60",
    }


def operations(timeouts: int, ok: int) -> Series:
    return {
        f'epd_store_operations_total{{{P}, operation="lookup", result="timeout"}}': (
            f"0+{timeouts}x60"
        ),
        f'epd_store_operations_total{{{P}, operation="lookup", result="ok"}}': f"0+{ok}x60",
    }


def items(before: int, now: int) -> Series:
    """Return 10 items per minute: `before` hits per minute for 8 h, then `now` for 2 h."""
    hits = f"0+{before}x{BEFORE} {before * BEFORE}+{now}x120"
    return {
        f'epd_items_total{{{P}, model_name="m", result="hit"}}': hits,
        f'epd_items_total{{{P}, model_name="m", result="encoded"}}': (
            f"0+{10 - before}x{BEFORE} {(10 - before) * BEFORE}+{10 - now}x120"
        ),
    }


def gauge(name: str, labels: str, value: str) -> Series:
    return {f"{name}{{{P}, {labels}}}": f"{value}x100"}


def bypassing(open_: str, bypassed: str, errors: str = "0x100") -> Series:
    """Return an engine's circuit-breaker state, bypassed fetches and errors."""
    return {
        f"vllm:ec_store_breaker_open{{{V}}}": open_,
        f"vllm:ec_store_bypassed_total{{{V}}}": bypassed,
        f"vllm:ec_store_errors_total{{{V}}}": errors,
        f"vllm:ec_store_timeouts_total{{{V}}}": "0x100",
    }


def maintained(succeeded: str, up: str = "1x100") -> Series:
    """Return a store service that reports its latest successful sweep; time starts at 0."""
    return {
        f"up{{{S}}}": up,
        f"ec_store_maintenance_last_success_timestamp_seconds{{{S}}}": succeeded,
    }


STORE = {"job": "ec-store", "instance": "s1:8100"}
PROXY = {"job": "epd", "instance": "p1:8000"}
CASES = {
    "EpdProxyDown": Case({f"up{{{P}}}": "1x5 0x60"}, {f"up{{{P}}}": "1x5 0 0 1x60"}, labels=PROXY),
    "EpdNoProxy": Case({'up{job="other"}': "1x60"}, {f"up{{{P}}}": "0x60"}, labels={"job": "epd"}),
    "EpdRequestsFail": Case(requests(6, 94), requests(4, 96)),
    "EpdFirstTokenSlow": Case(
        histogram("epd_time_to_first_token_seconds", 'model_name="m", ', 10, 90, "10"),
        histogram("epd_time_to_first_token_seconds", 'model_name="m", ', 4, 96, "10"),
        labels={"model_name": "m"},
    ),
    "EpdRequestsRefused": Case(
        requests(6, 94, "429")
        | {f'epd_requests_refused_total{{{P}, reason="queue_full"}}': "0+6x60"},
        requests(4, 96, "429")
        | {f'epd_requests_refused_total{{{P}, reason="queue_full"}}': "0+4x60"},
    ),
    "EpdRequestsQueue": Case(
        {f"epd_requests_queued{{{P}}}": "1x60"},
        {f"epd_requests_queued{{{P}}}": "9 9 0 9 9 0 9 9 0 9 9 0 9 9 0 9 9 0 9 9 0 9 9 0 9x30"},
        minutes=22,
        labels=PROXY,
    ),
    "EpdClientsLeave": Case(requests(25, 75, "499"), requests(15, 85, "499"), minutes=45),
    "EpdNoInstance": Case(
        gauge("epd_instance_up", E1, "0") | gauge("epd_instance_up", E2, "0"),
        gauge("epd_instance_up", E1, "0") | gauge("epd_instance_up", E2, "1"),
        labels=PROXY | {"role": "encode"},
    ),
    "EpdInstanceDown": Case(
        gauge("epd_instance_up", E1, "0") | gauge("epd_instance_up", E2, "1"),
        gauge("epd_instance_up", E1, "1 0 0 0 0 1") | gauge("epd_instance_up", E2, "1"),
        labels={"role": "encode", "exported_instance": "http://e1"},
    ),
    "EpdInstanceUnstable": Case(
        gauge("epd_instance_up", E1, "1")
        | {f'epd_instance_changes_total{{{P}, role="encode", state="ejected"}}': "0+1x60"},
        gauge("epd_instance_up", E1, "1")
        | {f'epd_instance_changes_total{{{P}, role="encode", state="ejected"}}': "0 1 2x60"},
        minutes=31,
        labels={"role": "encode"},
    ),
    "EpdStageFails": Case(stage(15, 85), stage(5, 95), labels={"stage": "encode"}),
    "EpdRequestsDegraded": Case(
        requests(0, 100) | {f'epd_requests_degraded_total{{{P}, kind="encode-local"}}': "0+6x60"},
        requests(0, 100) | {f'epd_requests_degraded_total{{{P}, kind="encode-local"}}': "0+4x60"},
        labels={"kind": "encode-local"},
    ),
    "EpdKvNearlyLost": Case(
        histogram("epd_kv_wait_seconds", "", 10, 90, "10"),
        histogram("epd_kv_wait_seconds", "", 0, 100, "10"),
    ),
    "EpdKvNotGivenBack": Case(
        {f'epd_kv_releases_total{{{P}, result="failed"}}': "0+1x60"},
        {f'epd_kv_releases_total{{{P}, result="failed"}}': "0 1 2 3x60"}
        | {f'epd_kv_releases_total{{{P}, result="ok"}}': "0+9x60"},
    ),
    "EpdStoreUnused": Case(
        gauge("epd_circuit_open", 'circuit="store_questions"', "1"),
        gauge("epd_circuit_open", 'circuit="store_questions"', "0 1 0 1 0"),
        labels={"instance": "p1:8000", "circuit": "store_questions"},
    ),
    "EpdStoreFails": Case(operations(15, 85), operations(5, 95), labels={"operation": "lookup"}),
    "EpdCacheHitsFell": Case(items(8, 1), items(8, 6), minutes=BEFORE + 100),
    "EpdEngineStoreUnused": Case(
        bypassing("1x100", "0+9x100"),
        bypassing("1 1 1 1 0 0 1 1 1 1 0 0 1 1 1 1 0 0 0x100", "0+9x100"),
        labels={"job": "vllm", "instance": "d1:8000", "role": "decode"}
        | {"model_name": "m", "engine": "0"},
    ),
    "EpdStoreMaintenanceLate": Case(
        maintained("0+60x10 600x100"),
        maintained("0+60x10 600x17 1680+60x100"),
        minutes=35,
        labels=STORE,
    ),
    "EpdStoreMaintenanceFails": Case(
        {f"ec_store_maintenance_failures_total{{{S}}}": "0x5 1 2 3 4 5 6x100"},
        {f"ec_store_maintenance_failures_total{{{S}}}": "0x5 1 2x100"},
        labels=STORE,
    ),
    "EpdStoreWritesRefused": Case(
        {f"ec_store_refused_writes_total{{{S}}}": "0x5 0+2x60"},
        {f"ec_store_refused_writes_total{{{S}}}": "0x5 7x60"},  # once
        labels=STORE,
    ),
    "EpdStorePinOld": Case(
        {
            f"ec_store_oldest_pin_seconds{{{S}}}": "3000+60x60",
            f"ec_store_pinned_bytes{{{S}}}": "30x60",
            f"ec_store_max_bytes{{{S}}}": "100x60",
        },
        {  # entries that an engine keeps
            f"ec_store_oldest_pin_seconds{{{S}}}": "3000+60x60",
            f"ec_store_pinned_bytes{{{S}}}": "20x60",
            f"ec_store_max_bytes{{{S}}}": "100x60",
        },
        labels=STORE,
    ),
    "EpdLoopStalls": Case(
        {f"epd_event_loop_lag_seconds{{{P}}}": "0.2x60"},
        {f"epd_event_loop_lag_seconds{{{P}}}": "0.2 0.2 0.01 0.2 0.2 0.2 0.05 0.2 0.01x60"},
        labels=PROXY,
    ),
    "EpdBackgroundFails": Case(
        {f'epd_background_failures_total{{{P}, task="probes"}}': "0 0 0 1x60"},
        {f'epd_background_failures_total{{{P}, task="probes"}}': "3x60"},
        minutes=10,
        labels={"instance": "p1:8000", "task": "probes"},
    ),
    "EpdReloadFailed": Case(
        {f"epd_config_last_reload_success{{{P}}}": "1 0x60"},
        {f"epd_config_last_reload_success{{{P}}}": "1x60"},
        labels=PROXY,
    ),
    "EpdVersionsMixed": Case(
        gauge("epd_build_info", 'version="1"', "1")
        | {'epd_build_info{job="epd", instance="p2:8000", version="2"}': "1x100"},
        gauge("epd_build_info", 'version="1"', "1")
        | {'epd_build_info{job="epd", instance="p2:8000", version="1"}': "1x100"},
        minutes=90,
    ),
}


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(ALERTS)


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_not_short_of_it(name: str, tmp_path: Path) -> None:
    assert_fires(name, CASES[name], tmp_path)


def assert_fires(name: str, case: Case, tmp_path: Path) -> None:
    severity = ALERTS[name]["labels"]["severity"]
    labels = {"alertname": name, "alertstate": "firing", "severity": severity} | case.labels
    said = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    fired = [{"labels": f"ALERTS{{{said}}}", "value": 1}]

    assert_promtool(
        tmp_path,
        asked(case.fires, f"ALERTS{{{alert(name)}}}", [case.minutes], fired),
        asked(case.quiet, f"ALERTS{{{alert(name)}}}", range(0, case.minutes, 2), []),
    )


@pytest.mark.parametrize("name", CASES)
def test_alerts_state_symptom_and_action(name: str) -> None:
    texts = ALERTS[name]["annotations"]
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))

    assert set(texts) == {"summary", "description", "runbook"}
    assert used <= set(CASES[name].labels)
    assert ALERTS[name]["labels"]["severity"] in {"page", "ticket"}


@pytest.mark.parametrize(
    ("name", "fires", "quiet"),
    [
        (
            "EpdEngineStoreUnused",
            bypassing("1x4 0 1x4 0 1x100", "0x100", errors="0+1x100"),  # one trial in 5 s fails
            bypassing("1x100", "0 9 18x100"),  # the last step before the engine became idle
        ),
        (
            "EpdStoreMaintenanceLate",
            maintained("0x100"),  # no sweep has succeeded
            maintained("0x8 540+60x100"),  # the first sweep takes long
        ),
        (
            "EpdStoreMaintenanceLate",
            maintained("0+60x5 _x100", up="1x5 0x100"),  # the service is down
            maintained("0+60x5 _ _ _ 540+60x100", up="1x5 0 0 0 1x100"),  # the service restarts
        ),
    ],
)
def test_an_alert_of_the_store_fires_in_other_cases_too(
    name: str, fires: Series, quiet: Series, tmp_path: Path
) -> None:
    assert_fires(name, Case(fires, quiet, labels=CASES[name].labels), tmp_path)


def test_ratios_are_of_the_last_five_minutes(tmp_path: Path) -> None:
    hit = 'model_name:epd_items_hit:ratio_rate5m{model_name="m"}'
    assert_promtool(
        tmp_path,
        asked(items(5, 2), hit, [60], [{"labels": hit, "value": 0.5}]),
        asked(items(10, 0), hit, [BEFORE + 60], [{"labels": hit, "value": 0}]),
        asked(
            requests(25, 75),
            "epd_requests_failed:ratio_rate5m",
            [30],
            [{"labels": "epd_requests_failed:ratio_rate5m", "value": 0.25}],
        ),
        asked(
            stage(10, 90),
            "stage:epd_stage_failed:ratio_rate5m",
            [30],
            [{"labels": 'stage:epd_stage_failed:ratio_rate5m{stage="encode"}', "value": 0.1}],
        ),
    )


def alert(name: str) -> str:
    return f'alertname="{name}", alertstate="firing"'


def asked(series: Series, expr: str, minutes: Iterable[int], samples: list[Any]) -> dict[str, Any]:
    """Return a promtool test of the samples at each of these minutes."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples} for minute in minutes
        ],
    }


def assert_promtool(folder: Path, *tests: dict[str, Any]) -> None:
    path = folder / "tests.yaml"
    files = [str(PROMETHEUS / name) for name in ("recording.yaml", "alerts.yaml")]
    document = {"rule_files": files, "evaluation_interval": "1m", "tests": list(tests)}
    path.write_text(yaml.safe_dump(document))

    ended = promtool("test", "rules", path)

    assert ended.returncode == 0, ended.stderr + ended.stdout
