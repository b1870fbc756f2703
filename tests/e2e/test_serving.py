"""Behaviour of a real stack for operators and clients, other than answers."""

import time
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.asking import ask, picture, unseen
from tests.e2e.served import Served, metric
from tests.paths import MEDIA
from tests.requests import image, text


def test_health_asks_every_engine(stack: Served) -> None:
    reply = httpx.get(f"{stack.stack.url}/health", timeout=120)
    body = reply.json()

    assert reply.status_code == 200
    assert set(body["instances"]) == {engine.url for engine in stack.stack.all_engines}
    assert {state["state"] for state in body["instances"].values()} == {"healthy"}


def test_models(stack: Served) -> None:
    assert [model.id for model in stack.client.models.list()] == [stack.model]


def test_engines_without_a_profiler_are_a_503(stack: Served) -> None:
    reply = httpx.post(f"{stack.stack.url}/start_profile", timeout=120)

    assert (reply.status_code, reply.json()["error"]["code"]) == (503, 503)


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_picture_is_the_engines_400_and_names_the_part(
    stack: Served, stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": [text(), picture("cat.jpg"), image(b"no png")]}]
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client.chat.completions.create(model=stack.model, messages=messages, stream=stream)

    assert caught.value.param == "messages[0].content[2]"
    assert caught.value.response.headers["x-epd-stage"] == "encode"


def test_a_wrong_model_is_the_engines_404(stack: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        stack.client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "hi"}]
        )


@pytest.mark.fault(45)
def test_a_client_that_leaves_stops_the_engine(stack: Served) -> None:
    def running() -> float:
        return sum(metric(engine, "vllm:num_requests_running") for engine in stack.consumers)

    stream = stack.client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "go on"}],
        max_tokens=3000,
        stream=True,
    )
    next(iter(stream))
    assert running() == 1
    stream.close()
    deadline = time.monotonic() + 120
    while running():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_file_outside_the_folder_is_refused(stack: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": (MEDIA.parent / "x.png").as_uri()}}
    messages: Any = [{"role": "user", "content": [part]}]
    with pytest.raises(openai.BadRequestError, match="allowed-local-media-path"):
        stack.client.chat.completions.create(model=stack.model, messages=messages)


def test_engine_metrics_count_stored_and_loaded_entries(stack: Served) -> None:
    """A worker's counts are reported with the engine's next step."""
    figures = {
        "vllm:ec_store_saves_total": stack.encode,
        "vllm:ec_store_save_bytes_total": stack.encode,
        "vllm:ec_store_save_seconds_count": stack.encode,
        "vllm:ec_store_hits_total": stack.consumers[0],
        "vllm:ec_store_bytes_total": stack.consumers[0],
    }
    before = {name: metric(engine, name) for name, engine in figures.items()}
    deadline = time.monotonic() + 120
    while True:
        ask(stack.client, stack.model, unseen(stack), text("counted?"))
        after = {name: metric(engine, name) for name, engine in figures.items()}
        if all(after[name] > before[name] for name in figures):
            return
        assert time.monotonic() < deadline, (before, after)


@pytest.mark.fault(34)
def test_request_that_every_engine_answers_500_ejects_none(stack: Served) -> None:
    for _ in range(14):
        # vLLM cuts the prompt within the picture, and fails.
        with pytest.raises(openai.InternalServerError):
            ask(stack.client, stack.model, text(), unseen(stack), truncate_prompt_tokens=5)
    body = httpx.get(f"{stack.stack.url}/health", timeout=120).json()

    assert {state["state"] for state in body["instances"].values()} == {"healthy"}
