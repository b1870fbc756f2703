"""Recorder of a request: its stages in its record."""

import pytest

from epd.request.model_names import MAX_LENGTH, OTHER
from epd.request.recorder import Recorder


def test_a_stage_that_ends_after_its_request_is_not_in_the_request_s_record() -> None:
    record = Recorder("", "POST", "")
    with record.time_stage("decode", "http://d:1"):
        pass
    record.end_request(200)
    with record.time_stage("release", "http://d:1"):
        pass

    assert [one.stage for one in record.stages] == ["decode"]


@pytest.mark.parametrize("more", [0, 1, 2_000_000])
def test_a_long_name_of_a_model_is_not_kept_with_the_record(more: int) -> None:
    record = Recorder("", "POST", "")
    record.begin_request("m" * (MAX_LENGTH + more))
    record.learn_model(b'{"model": "served"}')

    assert record.model is not None
    assert len(record.model) <= MAX_LENGTH + 1
    assert record.models.name_of(record.model) == (OTHER if more else "served")
