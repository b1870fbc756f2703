"""Events, and what is computed from them."""

from epd.events import StageDone, stage_seconds


def test_a_stages_time_is_from_its_first_request_to_its_last_answer() -> None:
    stages = [
        StageDone("encode", "a", 10.0, 1.0, None),
        StageDone("encode", "b", 10.5, 2.0, None),
        StageDone("decode", "d", 12.5, 0.5, None),
    ]

    assert stage_seconds(stages) == {"encode": 2.5, "decode": 0.5}
