"""Model names in labels: only names that instances use, never a client's."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.request.model_names import LOOKED_AT_BYTES, MAX_NAMES, MAX_REQUESTED, OTHER, ModelNames

NAMES = st.text(max_size=12) | st.sampled_from(["m", "a/b-7B", "x" * 300, '"', "\n", "other"])


def said(name: str, content: str = "") -> bytes:
    return orjson.dumps({"id": "c", "model": name, "choices": [{"content": content}]})


@given(st.lists(st.tuples(NAMES, st.none() | NAMES), max_size=30), NAMES)
def test_a_label_is_a_name_reported_by_an_instance(
    answered: list[tuple[str, str | None]], asked: str
) -> None:
    names = ModelNames()
    for model, answer in answered:
        if answer is not None:
            names.learn_name(model, said(answer))

    assert names.name_of(asked) in {"", OTHER, *(answer for _, answer in answered if answer)}
    assert names.name_of("") == names.name_of(None) == ""


def test_an_alias_is_labelled_by_the_model_of_the_answer() -> None:
    names = ModelNames()
    before = names.name_of("alias")
    names.learn_name("alias", b'data: {"id": "c", "model": "Qwen/Qwen2.5-VL-3B"}\n\n')

    assert (before, names.name_of("alias")) == (OTHER, "Qwen/Qwen2.5-VL-3B")


@given(st.text())
def test_text_of_a_model_does_not_set_the_model_name(content: str) -> None:
    names = ModelNames()
    names.learn_name("m", orjson.dumps({"choices": [{"content": '"model": "x" ' + content}]}))

    assert names.name_of("m") == OTHER


@pytest.mark.parametrize(
    "answer",
    [
        b'{"id": "r", "metadata": {"model": "x"}, "model": "m", "output": []}',
        (
            b"event: response.created\n"
            b'data: {"response": {"id": "r", "metadata": {"model": "x"}, "model": "m"}}\n\n'
            b'event: response.in_progress\ndata: {"response": {"model": "x"}}\n\n'
        ),
        b'{"id": "a", "content": [{"type": "tool_use", "input": {"model": "x"}}], "model": "m"}',
        b'event: message_start\ndata: {"message": {"content": [], "model": "m"}}\n\n',
    ],
)
def test_fields_of_clients_and_tool_calls_do_not_set_the_model_name(answer: bytes) -> None:
    names = ModelNames()
    names.learn_name("alias", answer)

    assert names.name_of("alias") == "m"


@pytest.mark.parametrize(
    "answer", [b"", b'"model"', b'{"model"', b'["model", {"model": "x"}]', b'{"model": ["x"]}']
)
def test_an_invalid_answer_names_no_model(answer: bytes) -> None:
    names = ModelNames()
    names.learn_name("m", answer)

    assert names.name_of("m") == OTHER


def test_model_names_are_bounded() -> None:
    names = ModelNames()
    for number in range(10 * MAX_NAMES):
        names.learn_name(f"asked {number}", said(f"served {number}"))
    labels = {names.name_of(f"asked {number}") for number in range(10 * MAX_NAMES)}

    assert len(labels) <= MAX_NAMES + 1
    assert labels <= {OTHER, *(f"served {number}" for number in range(MAX_NAMES))}


def test_model_names_beyond_the_limit_are_dropped_and_learned_again() -> None:
    names = ModelNames()
    for number in range(2 * MAX_REQUESTED):
        names.learn_name(f"asked {number}", said("m"))
    forgotten = names.name_of("asked 0")
    names.learn_name("asked 0", said("m"))

    assert (forgotten, names.name_of("asked 0")) == (OTHER, "m")


def test_an_answer_of_megabytes_is_not_read_for_a_name() -> None:
    names = ModelNames()
    names.learn_name("m", said("m", " " * LOOKED_AT_BYTES))

    assert names.name_of("m") == OTHER
