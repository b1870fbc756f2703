"""Models and chat templates that an encode instance has in another form, or not at all."""

from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.adapters import ADAPTER
from tests.e2e.asking import PREPROCESSED, ask, both_ways, check_equal, unseen
from tests.e2e.served import Served, metric
from tests.requests import text


@both_ways
def test_new_picture_under_an_adapters_name_is_encoded_by_the_encode_instance(
    stack: Served, stream: bool
) -> None:
    consumer = stack.consumers[0]
    pictures = [unseen(stack), unseen(stack)]
    before = metric(consumer, PREPROCESSED)
    answers = {
        model: ask(stack.client, model, text(), *pictures, stream=stream)
        for model in (ADAPTER, stack.model, ADAPTER)
    }
    encoded_elsewhere = metric(consumer, PREPROCESSED) == before
    alone = {
        model: ask(stack.baseline, model, text(), *pictures, stream=stream) for model in answers
    }

    assert encoded_elsewhere
    assert answers == alone
    assert answers[ADAPTER] != answers[stack.model]


def test_adapter_and_its_model_share_encoder_outputs(stack: Served) -> None:
    part, encode = unseen(stack), stack.encode
    ask(stack.client, stack.model, text(), part)
    before = metric(encode, PREPROCESSED)
    ask(stack.client, ADAPTER, text(), part)

    assert metric(encode, PREPROCESSED) == before


def test_unknown_model_is_the_engines_404(stack: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(stack.client, "unknown", text(), unseen(stack))


@both_ways
def test_template_that_requires_text_accepts_encode_requests(stack: Served, stream: bool) -> None:
    part = unseen(stack)
    new = check_equal(stack, text(), part, stream=stream)

    assert check_equal(stack, text(), part, unseen(stack), stream=stream) != new
    assert check_equal(stack, text(), part, stream=stream) == new


def test_responses_and_messages_are_encoded_with_a_template_that_requires_text(
    stack: Served,
) -> None:
    url = unseen(stack)["image_url"]["url"]
    shown: Any = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    for client in (stack.baseline, stack.client, stack.client):
        response = client.responses.create(
            model=stack.model,
            input=[{"role": "user", "content": shown}],
            max_output_tokens=4,
        )
        assert response.usage is not None
        assert response.usage.output_tokens == 4
    data = unseen(stack)["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, text()]
    with anthropic.Anthropic(base_url=stack.stack.url, api_key="k", max_retries=0) as claude:
        for _ in range(2):
            message = claude.messages.create(
                model=ADAPTER,
                max_tokens=4,
                messages=[{"role": "user", "content": content}],
            )
            assert message.usage.output_tokens == 4


def test_encode_request_has_the_chat_template_kwargs(stack: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="refuse is set") as caught:
        ask(stack.client, stack.model, text(), unseen(stack), chat_template_kwargs={"refuse": True})

    assert caught.value.response.headers["x-epd-stage"] == "encode"


def test_template_that_requires_a_system_message_accepts_encode_requests(stack: Served) -> None:
    part = unseen(stack)

    def answered(client: openai.OpenAI, *first: Any) -> tuple[str | None, str | None]:
        messages: Any = [*first, {"role": "user", "content": [text(), part]}]
        raw = client.chat.completions.with_raw_response.create(
            model=stack.model,
            messages=messages,
            max_tokens=8,
            temperature=0,
            extra_body={"chat_template_kwargs": {"strict": True}},
        )
        return raw.parse().choices[0].message.content, raw.headers.get("x-epd-items")

    with pytest.raises(openai.BadRequestError, match="needs a system message"):
        answered(stack.client)
    system = {"role": "system", "content": "Be brief."}
    expected, _ = answered(stack.baseline, system)

    assert answered(stack.client, system) == (expected, "hit=0,encoded=1,local=0")
    assert answered(stack.client, system) == (expected, "hit=1,encoded=0,local=0")
