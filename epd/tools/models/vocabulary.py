"""Tokens of a tiny model: one per byte, then the special ones of its family."""

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = (string.ascii_lowercase + " ").encode()
"""Bytes of the tokens that a tiny model answers with."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Special tokens of a family, and the places of media in its prompts.

    Attributes:
        special: special tokens of the family, after those of every family.
        placeholders: text that the chat template writes for an item, by modality.
        names: special tokens that processors look up by a name, such as `image_token`.
        size: number of tokens with embeddings in the model.
    """

    special: tuple[str, ...]
    placeholders: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    size: int = 320

    def id(self, token: str) -> int:
        return 256 + self._special().index(token)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with a chat template.

        The number of a byte token is its byte.
        """
        vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
        bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bytewise.decoder = decoders.ByteLevel()
        bytewise.add_special_tokens(list(self._special()))
        fast = PreTrainedTokenizerFast(
            tokenizer_object=bytewise, eos_token=END, pad_token=PAD, **self.names
        )
        fast.chat_template = self.chat_template()
        return fast

    def chat_template(self) -> str:
        """Return the ChatML template that vLLM renders messages with.

        It writes the field `language` of media parts, as templates of translation models do.
        """
        return f"""
{{%- set placeholders = {json.dumps(dict(self.placeholders))} -%}}
{{%- for message in messages -%}}
    {{{{- '{START}' + message.role + '\\n' -}}}}
    {{%- if message.content is string -%}}
        {{{{- message.content -}}}}
    {{%- else -%}}
        {{%- for part in message.content -%}}
            {{%- if part.type == 'text' -%}}
                {{{{- part.text -}}}}
            {{%- else -%}}
                {{{{- (part.language or '') + placeholders[part.type] -}}}}
            {{%- endif -%}}
        {{%- endfor -%}}
    {{%- endif -%}}
    {{{{- '{END}\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{- '{START}assistant\\n' -}}}}
{{%- endif -%}}
"""

    def _special(self) -> tuple[str, ...]:
        return (PAD, START, END, *self.special)


def byte_letters() -> list[str]:
    """Return the letters by which byte-level tokenizers write each byte.

    Printable bytes stand for themselves, the others for the letters from U+0100 on:
    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
