"""Prompt of a turn: the name of its conversation, and the `/tokenize` request for its tokens. Pure.

vLLM's `/tokenize` renders a conversation as its chat endpoint does, except for the effect of a few
fields that it does not have (`vllm/entrypoints/serve/tokenize/protocol.py`). If a request has a
field that may have such an effect, its tokens count as unknown.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from blake3 import blake3

from epd.api.body import dump_json
from epd.api.items import EMBEDS, MM_KWARGS, MODALITY, TEXTS, Body
from epd.errors import BadRequest

CONVERSATION = "conversation_id"
"""Field for the proxy: the client's name for the conversation that the request continues."""

COMPARED = TEXTS | MODALITY.keys() | set(EMBEDS)
"""Types of content parts that are compared between turns; the last are the proxy's own."""

MAX_NAME = 256
"""Maximum length of a conversation's name, in characters."""

NEUTRAL = frozenset(
    {
        # Sampling.
        *("best_of", "frequency_penalty", "length_penalty", "min_p", "n", "presence_penalty"),
        *("repetition_detection", "repetition_penalty", "seed", "temperature", "top_k", "top_p"),
        *("allowed_token_ids", "bad_words", "logit_bias", "use_beam_search", "watermarking"),
        # Length and end of the answer.
        *("ignore_eos", "include_stop_str_in_output", "max_completion_tokens", "max_tokens"),
        *("min_tokens", "stop", "stop_token_ids"),
        # Content and form of the answer.
        *("echo", "logprob_token_ids", "logprobs", "prompt_logprobs", "top_logprobs"),
        *("return_prompt_text", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("parallel_tool_calls", "stream", "stream_interval", "stream_options"),
        # Names and handling of the request.
        *("cache_salt", "ec_transfer_params", "kv_transfer_params", "metadata", "model"),
        *("priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier"),
        *("session_id", "store", "user"),
    }
)
"""Fields on which a prompt does not depend, or by which a conversation is identified."""

ALIKE = frozenset(
    {
        *MM_KWARGS,
        *("include_reasoning", "response_format", "structured_outputs"),
        *("thinking_token_budget", "tool_choice", "vllm_xargs"),
    }
)
"""Fields on which the KV cache may depend in addition to the tokens. Two turns need equal ones."""


def conversation_id(body: Body) -> str | None:
    """Return a request's name for its conversation, if any. Raise `BadRequest` if it is invalid."""
    match body.get(CONVERSATION):
        case None:
            return None
        case str() as name if 0 < len(name) <= MAX_NAME:
            return name
        case _:
            raise BadRequest(
                f"{CONVERSATION} must be a string of 1 to {MAX_NAME} characters", param=CONVERSATION
            )


class PromptQuestion(NamedTuple):
    """Prompt of a request, as far as the proxy knows it.

    Attributes:
        question: body of the `/tokenize` request, which is not needed if `tokens` are known.
        form: digest of the fields that must be equal in two turns.
        tokens: tokens of the prompt, if the request has tokens and not text.
    """

    question: Body
    form: str
    tokens: list[int] | None = None


def prompt_of(body: Body, fields: Iterable[str]) -> PromptQuestion | None:
    """Return the prompt of a request; None if its tokens cannot be determined.

    `/tokenize` tokenizes the `fields` as the request's endpoint does.
    """
    question = {name: body[name] for name in ("model", *fields) if name in body}
    if not _determines_kv(question.get("messages")):
        return None
    match question.get("prompt"):
        case [str() | list() as alone]:  # a batch of one
            question["prompt"] = alone
    others = {name for name, value in body.items() if value is not None}  # null has no effect
    if not others <= question.keys() | NEUTRAL | ALIKE:
        return None
    equal = {name: body[name] for name in ALIKE if body.get(name) is not None}
    form = blake3(dump_json(equal, sort_keys=True)).hexdigest()
    prompt = question.get("prompt")
    return PromptQuestion(question, form, prompt if isinstance(prompt, list) else None)


def _determines_kv(messages: Any) -> bool:
    """Return whether tokens and media keys determine the KV cache of messages.

    They do for text, and for media, which are compared by their keys. With other parts, such as
    `prompt_embeds`, two turns may have equal tokens and different content.
    """
    if not isinstance(messages, list):
        return messages is None
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, str) or _kind(part) in COMPARED for part in parts)


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None
