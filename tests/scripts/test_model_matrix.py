"""Model matrix: its questions, the comparison of answers, and the document."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from epd.tools.bench.answer import Answer, differences, read_answer, read_events
from epd.tools.up.process import ProcessDied
from scripts.matrix.cases import cases, distinct
from scripts.matrix.results import CaseResult, Outcome, Result
from scripts.matrix.running import summary
from scripts.matrix.subjects import E_P_D, E_PD, PICTURE, SOUND, SUBJECTS, VIDEO
from scripts.matrix.table import written
from scripts.tiny.families import FAMILIES

DOCUMENT = """# Models

Above, by hand.

<!-- matrix of the models -->
| old |
<!-- end -->

Between, by hand.

<!-- differences of the models -->
<!-- end -->

Below, by hand.
"""
USAGE = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
ANSWER = Answer(200, ["a", "b"], [-0.5, -1.0], "length", USAGE)
MODALITIES = (PICTURE, VIDEO, SOUND)
RESULT = Result(
    "tiny-qwen3-vl",
    E_PD,
    "0.1",
    "2026-01-02",
    "float32",
    distinct={PICTURE: 4, VIDEO: 3},
    sent={PICTURE: "metadata", VIDEO: "media"},
    hits=1,
    repeats=2,
    cases=[
        CaseResult("text only", Outcome.EQUAL),
        CaseResult("picture", Outcome.DIFFERENT, "tokens; usage"),
        CaseResult("two videos", Outcome.REFUSED, "at most 1 | video"),
        CaseResult("late", Outcome.NOT_RUN),
    ],
)


def found(got: Answer, tolerance: float = 1e-3) -> list[str]:
    return list(differences(ANSWER, got, tolerance))


def test_an_answer_equals_itself() -> None:
    assert found(replace(ANSWER, items="hit=1", seconds=3.0)) == []


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (replace(ANSWER, status=500, error="it broke"), "status 500, not 200: it broke"),
        (replace(ANSWER, tokens=["a", "c"]), "tokens"),
        (replace(ANSWER, tokens=["a"], logprobs=[-0.5]), "tokens"),
        (replace(ANSWER, logprobs=[-0.5, -1.002]), "log-probabilities, by 0.002"),
        (replace(ANSWER, finish="stop"), "finish reason stop, not length"),
        (replace(ANSWER, usage={**USAGE, "prompt_tokens": 19}), "usage"),
    ],
)
def test_differences_are_named(got: Answer, expected: str) -> None:
    assert found(got) == [expected]


def test_log_probabilities_may_differ_by_the_tolerance() -> None:
    assert found(replace(ANSWER, logprobs=[-0.5, -1.02]), tolerance=5e-2) == []


def test_two_refusals_of_one_status_are_alike() -> None:
    refusal = Answer(400, error="too many")
    assert list(differences(refusal, replace(refusal, error="too  many"), 1e-3)) == []
    assert refusal.is_refusal


def whole(reply: dict[str, Any]) -> Answer:
    return read_answer([reply], "", 0.0)


def test_a_streamed_answer_is_read_like_a_whole_one() -> None:
    content = [{"token": token, "logprob": -1.0} for token in "ab"]
    choice = {"finish_reason": "length", "logprobs": {"content": content}}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"finish_reason": None, "logprobs": None}]},
        {"choices": [{"finish_reason": None, "logprobs": {"content": content[:1]}}]},
        {"choices": [{"finish_reason": "length", "logprobs": {"content": content[1:]}}]},
        {"choices": [], "usage": USAGE},
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    streamed = read_events("".join([*lines, "data: [DONE]\n\n"]).encode())

    assert read_answer(streamed, "", 0.0) == whole({"choices": [choice], "usage": USAGE})


def test_an_error_event_in_a_stream_is_not_an_answer() -> None:
    assert whole({"error": {"message": "lost"}}).status == 500


@pytest.mark.parametrize("modalities", [(PICTURE,), (SOUND,), MODALITIES])
def test_cases_use_different_items(modalities: Sequence[str]) -> None:
    """An item of an earlier case would be a hit, and its encoding would not be tested."""
    seen: dict[str, str] = {}
    for request in (request for modality in modalities for request in distinct(modality)):
        seen |= dict.fromkeys(map(json.dumps, request.media), "distinct")
    for case in cases(modalities):
        for request in case.requests:
            for item in map(json.dumps, request.media):
                owner = seen.setdefault(item, case.name)
                assert owner == case.name or request.seen or "again" in case.name


def test_cases_differ_in_their_names() -> None:
    names = [case.name for case in cases(MODALITIES)]
    assert len(set(names)) == len(names)


def test_a_model_is_asked_about_its_own_modalities() -> None:
    kinds = {
        part["type"] for case in cases((SOUND,)) for request in case.requests
        for part in request.media
    }  # fmt: skip
    assert kinds == {"input_audio"}


def test_every_family_is_in_the_matrix() -> None:
    assert {subject.name for subject in SUBJECTS} == set(FAMILIES)


def test_a_read_result_equals_the_written_one() -> None:
    assert msgspec.json.decode(json.dumps(asdict(RESULT)), type=Result) == RESULT


def test_the_end_of_an_engine_is_reported_without_its_log() -> None:
    death = ProcessDied("encode-20313 ended with code 1. The end of /somewhere/log:\na\nb")
    assert summary(death) == "encode ended with code 1"


def line(document: str, begin: str) -> str:
    """Return the first line with this beginning; the matrix precedes the differences."""
    return next(line for line in document.splitlines() if line.startswith(begin))


def test_a_row_contains_the_result() -> None:
    assert line(written(DOCUMENT, [RESULT]), "| Qwen3-VL") == (
        "| Qwen3-VL | picture, video (3 of 4 told apart) "
        "| 1 of 3 (1 refused by both, 1 not run) | not run | 1 of 2 "
        "| picture: metadata, video: media |"
    )


def test_a_model_without_a_run_is_reported() -> None:
    assert line(written(DOCUMENT, [RESULT]), "| Gemma 3 ") == (
        "| Gemma 3 | picture | not run | not run | not run | not run |"
    )


def test_differences_and_notes_have_rows() -> None:
    noted = replace(RESULT, topology=E_P_D, notes=["it died"], lost=2)
    lines = written(DOCUMENT, [noted]).splitlines()

    assert "| Qwen3-VL | E+P+D | picture | different: tokens; usage |" in lines
    assert "| Qwen3-VL | E+P+D | two videos | refused by both: at most 1 / video |" in lines
    assert "| Qwen3-VL | E+P+D |  | it died |" in lines
    assert "| Qwen3-VL | E+P+D |  | 2 entries not found by a consumer |" in lines


def test_cases_in_which_the_same_was_seen_share_a_row() -> None:
    refused = [CaseResult(name, Outcome.REFUSED, "one alone") for name in ("two", "twice")]
    lines = written(DOCUMENT, [replace(RESULT, cases=refused)]).splitlines()

    assert "| Qwen3-VL | E+PD | two; twice | refused by both: one alone |" in lines


def test_handwritten_parts_stay() -> None:
    once = written(DOCUMENT, [RESULT])
    by_hand = [text for text in DOCUMENT.splitlines() if text.endswith("by hand.")]

    assert [text for text in once.splitlines() if text.endswith("by hand.")] == by_hand
    assert "| old |" not in once
    assert written(once, [RESULT]) == once
