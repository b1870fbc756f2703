"""Workloads written and read as AIPerf's JSONL."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.__main__ import main
from epd.tools.bench.compare.traces import TOKENS, TraceInvalid, read_trace, trace_lines
from epd.tools.bench.compare.workloads import SCALES, WORKLOADS, Question, Workload

HERE = Path()
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text()}),
    min_size=1,
    max_size=3,
)
QUESTIONS = st.builds(Question, st.just(""), MESSAGES, st.integers(1, 9999))


def parsed(*lines: Any) -> Workload:
    return read_trace("t", [json.dumps(line).encode() for line in lines], HERE, 4)


@given(st.lists(st.lists(QUESTIONS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_trace_has_the_conversations_that_were_written(turns: list[list[Question]]) -> None:
    workload = Workload("a b", 4, turns)

    assert read_trace("a b", trace_lines(workload), HERE, 4) == workload


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_no_line_is_another_error(lines: list[bytes]) -> None:
    with pytest.raises(TraceInvalid):
        read_trace("t", lines, HERE, 4)


def test_lines_of_aiperf_become_requests(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"picture")
    lines = [
        {"timestamp": 5, "text_input": "Hi", "output_length": 7, "session_id": "s"},
        {"text": "What is it?", "images": ["1.png", "https://h/2.jpg"]},
        {"messages": [{"role": "user", "content": "and?"}], "session_id": "s", "delay": 3},
        {"image": "data:image/png;base64,AA==", "role": "user"},
    ]
    content = b"\n\n".join(json.dumps(line).encode() for line in lines)
    (tmp_path / "t.jsonl").write_bytes(content)
    with (tmp_path / "t.jsonl").open("rb") as file:
        workload = read_trace("t", file, tmp_path, 4)

    first, second, third = workload.conversations
    assert [question.tokens for question in first] == [7, TOKENS]
    assert [question.messages[-1]["content"] for question in first] == ["Hi", "and?"]
    [text, own, elsewhere] = second[0].messages[0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    kind, _, data = own["image_url"]["url"].partition(",")
    assert (kind, base64.b64decode(data)) == ("data:image/png;base64", b"picture")
    assert elsewhere["image_url"]["url"] == "https://h/2.jpg"
    assert third[0].messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"input_length": 10, "hash_ids": [1]}, "input_length alone has no content"),
        ({"session_id": "s", "turns": [{"text": "a"}]}, "no answers of earlier turns"),
        ({"messages": []}, "messages is no list of objects with a role"),
        ({"messages": [{"content": "a"}]}, "messages is no list of objects with a role"),
        ({"text_input": 1}, "text_input no text"),
        ({"text": "a", "output_length": 0.5}, "output_length 0.5 is no positive number"),
        ({"text": "a", "output_length": -1}, "output_length -1 is no positive number"),
        ({"texts": [{"name": "n", "contents": ["a"]}]}, "must be text, not named fields"),
        ({"images": 3}, "must be text"),
        ({"text": "a", "session_id": 1}, "session_id is no text"),
        ({}, "neither messages nor a text or a picture"),
        ([], "neither messages nor a text or a picture"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: Any, reason: str) -> None:
    with pytest.raises(TraceInvalid, match=f"line 2: .*{reason}"):
        parsed({"text": "a"}, line)


def test_written_workloads_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "compare", "--scale", "small", "--workloads", "pool", "screens"]
    main([*words, "--write-traces", str(tmp_path)])
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]

    assert [file.name for file in files] == [
        *("pool-first-pass.jsonl", "pool-second-pass.jsonl"),
        "screens.jsonl",
    ]
    [screens] = WORKLOADS["screens"](SCALES["small"])
    with files[2].open("rb") as lines:
        assert read_trace("screens", lines, tmp_path, screens.at_once) == screens


def test_a_trace_that_cannot_be_read_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{}\n")
    for name, reason in (("t", "line 1: it has neither"), ("u", ".*No such file")):
        with pytest.raises(SystemExit, match=rf"--traces \S+{name}.jsonl: {reason}"):
            main(["bench", "compare", "--model", "m", "--traces", str(tmp_path / f"{name}.jsonl")])
