"""Logging of a repeating failure."""

from structlog.testing import capture_logs

from epd.state_log import StateLog


def test_state_log_logs_each_reason_once_and_the_recovery() -> None:
    state = StateLog("the file", "it waits", path="a")
    with capture_logs() as lines:
        state.record_success()
        for reason in ("gone", "gone", "empty"):
            state.record_failure(reason)
        for _ in range(2):
            state.record_success()
        state.record_failure("empty")

    failed, recovered = "the file cannot be used: it waits", "the file can be used again"
    assert [(line["event"], line.get("reason")) for line in lines] == [
        (failed, "gone"),
        (failed, "empty"),
        (recovered, None),
        (failed, "empty"),
    ]
    assert {line["path"] for line in lines} == {"a"}
