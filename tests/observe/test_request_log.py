"""Lines of requests in the log."""

from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog

from epd.config import ProxyConfig
from epd.events import RequestRecord, StageDone
from epd.observe.request_log import LogObserver


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("kv_wait_s", "level"), [(None, "info"), (14.9, "info"), (15.1, "warning")]
)
def test_half_of_a_lease_is_a_warning(kv_wait_s: float | None, level: str) -> None:
    assert line_of(request(kv_wait_s=kv_wait_s))["log_level"] == level


def request(**more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "r",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "seconds": 20.0,
        "error": None,
        "reason": None,
        "stages": (),
        "items": {},
        "retries": 0,
    }
    return RequestRecord(**{**fields, "engine_id": "r", **more})


def line_of(event: RequestRecord) -> MutableMapping[str, Any]:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    config = ProxyConfig.model_validate(urls | {"kv_lease_s": 30})
    with structlog.testing.capture_logs() as lines:
        LogObserver(config).request_done(event)
    [line] = lines
    return line


def test_readiness_probe_is_logged_if_its_result_differs_from_the_last() -> None:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    observer = LogObserver(ProxyConfig.model_validate(urls))
    with structlog.testing.capture_logs() as lines:
        for error in ("no_decode", "no_decode", None, None, "no_decode", "shutting_down"):
            for path in ("/ready", "/ping"):
                observer.request_done(RequestRecord("r", "GET", path, error=error))

    for path in ("/ready", "/ping"):
        levels = [line["log_level"] for line in lines if line["path"] == path]
        shown = [level for level in levels if level != "debug"]
        assert shown == ["warning", "info", "warning", "warning"]


def test_the_line_of_a_stream_names_its_instances_its_model_and_its_first_token() -> None:
    stages = (
        StageDone("encode", "http://e:1", 0.0, 0.1, None),
        StageDone("prefill", "http://p:1", 0.1, 0.1, None),
        StageDone("decode", "http://d:1", 0.2, 0.1, "decode_timeout"),
        StageDone("decode", "http://d:2", 0.3, 0.1, None),
    )
    line = line_of(
        request(
            stages=stages, model_name="m", stream=True, first_token_s=0.45678, answer_bytes=1234
        )
    )

    assert (line["prefill"], line["decode"], line["model"]) == ("http://p:1", "http://d:2", "m")
    assert (line["stream"], line["ttft_s"], line["answer_bytes"]) == (True, 0.4568, 1234)
    assert "encode" not in line


def test_the_line_of_a_whole_answer_has_no_time_to_first_token() -> None:
    line = line_of(request(first_token_s=0.5, answer_bytes=9))

    assert line["answer_bytes"] == 9
    assert {"stream", "ttft_s"}.isdisjoint(line)


def test_the_line_of_a_request_does_not_name_its_tenant() -> None:
    assert "alice" not in line_of(request(tenant="alice")).values()


def test_the_line_of_a_request_begins_with_how_it_ended() -> None:
    line = line_of(request(status=502, error="decode_died", reason="it broke off"))

    assert [*line][:6] == ["status", "seconds", "error", "reason", "method", "path"]
