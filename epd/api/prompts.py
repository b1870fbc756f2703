"""What a request's prompt is made of, and how an instance is asked for its tokens. Pure.

vLLM's `/tokenize` renders a conversation as its chat endpoint does, but for what a few fields do to
it (`vllm/entrypoints/serve/tokenize/protocol.py`). A request that has any other field is one of
which nobody can tell what its tokens will be.

About how many tokens a prompt is, without a tokenizer.

Four bytes of UTF-8 are taken for one token, which is what tokenizers of large vocabularies make of
English; token ids are counted. Code and lists of numbers are up to twice as many tokens as that,
Chinese and Japanese about a third more. Media are not in it.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from blake3 import blake3

from epd.api.body import dumped
from epd.api.items import EMBEDS, MM_KWARGS, MODALITY, TEXTS, Body
from epd.errors import BadRequest

FIELDS = ("messages", "prompt", "input", "instructions", "system", "tools")
"""Where the endpoints' requests have what their prompts are made of."""

NO_TEXT = frozenset({*MODALITY, "source", "uuid", "type"})
"""Keys whose values are no text."""

BYTES_PER_TOKEN = 4


def prompt_tokens(body: Body) -> int:
    """About how many tokens the text of a request is.

    A role is counted as text, in place of what the chat template puts around a message.
    """
    text_bytes = ids = 0
    left: list[Any] = [body[field] for field in FIELDS if field in body]
    while left:
        value = left.pop()
        match value:
            case str():
                text_bytes += len(value) if value.isascii() else len(value.encode())
            case list():
                if value and type(value[0]) is int:
                    ids += len(value)
                else:
                    left += value
            case dict():
                left += (value[key] for key in value if key not in NO_TEXT)
    return ids + -(-text_bytes // BYTES_PER_TOKEN)


CONVERSATION = "conversation_id"
"""A field of the proxy's: what a client calls the conversation that its request goes on with."""

COMPARED = TEXTS | MODALITY.keys() | set(EMBEDS)
"""Types of content parts that are compared between turns; the last are the proxy's own."""

MAX_NAME = 256
"""Characters of it."""

NEUTRAL = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "cache_salt",
        "ec_transfer_params",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "prompt_cache_key",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "request_id",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "seed",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
        "use_beam_search",
        "user",
        "watermarking",
    }
)
"""Fields that a prompt does not depend on, or that a conversation is known by."""

ALIKE = frozenset(
    {
        *MM_KWARGS,
        "include_reasoning",
        "response_format",
        "structured_outputs",
        "thinking_token_budget",
        "tool_choice",
        "vllm_xargs",
    }
)
"""Fields that the KV cache may depend on beside the tokens; of two turns they must be alike."""


def conversation_id(body: Body) -> str | None:
    """What a request calls its conversation; None: nothing.

    Raises:
        BadRequest: it is no name.
    """
    match body.get(CONVERSATION):
        case None:
            return None
        case str() as name if 0 < len(name) <= MAX_NAME:
            return name
        case _:
            raise BadRequest(
                f"{CONVERSATION} must be a string of 1 to {MAX_NAME} characters",
                param=CONVERSATION,
            )


class Prompt(NamedTuple):
    """A request's prompt, as far as the proxy knows it.

    Attributes:
        question: the body of `/tokenize`; where there is nothing to ask, `tokens` has them.
        form: the digest of what must be alike in two turns.
        tokens: the prompt's, where the request is of tokens.
    """

    question: Body
    form: str
    tokens: list[int] | None = None


def prompt_of(body: Body, fields: Iterable[str]) -> Prompt | None:
    """The prompt of a request; None: nobody can tell what its tokens will be.

    Args:
        body: the request.
        fields: what `/tokenize` makes tokens of, of this kind of request.
    """
    question = {name: body[name] for name in ("model", *fields) if name in body}
    if not _is_told(question.get("messages")):
        return None
    match question.get("prompt"):
        case [str() | list() as alone]:  # a batch of one
            question["prompt"] = alone
    others = {name for name, value in body.items() if value is not None}  # null says nothing
    if not others <= question.keys() | NEUTRAL | ALIKE:
        return None
    alike = {name: body[name] for name in ALIKE if body.get(name) is not None}
    form = blake3(dumped(alike, sort_keys=True)).hexdigest()
    given = question.get("prompt")
    return Prompt(question, form, given if isinstance(given, list) else None)


def _is_told(messages: Any) -> bool:
    """Whether tokens and media keys say all that the KV cache of messages depends on.

    They do for text, and for media, which are compared by their keys. Of anything else, such as
    `prompt_embeds`, two turns may have the same tokens and other content.
    """
    if not isinstance(messages, list):
        return messages is None
    contents = (one.get("content") if isinstance(one, dict) else None for one in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, str) or _kind(part) in COMPARED for part in parts)


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None
