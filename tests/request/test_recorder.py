"""Recorder of a request: its stages in its record."""

from epd.request.recorder import Recorder


def test_a_stage_that_ends_after_its_request_is_not_in_the_request_s_record() -> None:
    record = Recorder("", "POST", "")
    with record.time_stage("decode", "http://d:1"):
        pass
    record.end_request(200)
    with record.time_stage("release", "http://d:1"):
        pass

    assert [one.stage for one in record.stages] == ["decode"]
