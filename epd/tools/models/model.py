"""Tiny model, and the files that vLLM serves it from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from epd.tools.models.vocabulary import END, START, Vocabulary
from epd.tools.models.weights import GAINS, redraw, renamed

HIDDEN = 256
"""Width of every text model, and so of every encoder output."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Model as its family builds it.

    Attributes:
        model: model without its final weights.
        processor: processor with the tokenizer; None: both come with vLLM.
        config: configuration that vLLM reads, if it differs from the model's own.
        prefixes: prefixes that vLLM expects for the weights, by those that the weights have.
        files: texts of additional files, by their names.
        first_byte: number of the token of byte 0.
        gains: factors on the weights' deviations, by the names of layers.
    """

    model: PreTrainedModel
    processor: ProcessorMixin | None = None
    config: PreTrainedConfig | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    first_byte: int = 0
    gains: Mapping[str, float] = field(default_factory=GAINS.copy)

    def write(self, folder: Path) -> None:
        """Draw the weights and write all files that vLLM needs to serve the model."""
        self.write_config(folder)
        redraw(self.model, self.first_byte, self.gains)
        self.model.to(torch.bfloat16)
        weights = dict(self.named_weights())
        file = folder / "model.safetensors"
        save_file(weights, file, {"format": "pt"})
        file.chmod(0o644)  # safetensors writes it for its owner alone

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under the names that vLLM expects."""
        yield from renamed(self.model.state_dict(), self.prefixes)

    def write_config(self, folder: Path) -> None:
        """Write all files but the weights."""
        (self.config or self.model.config).save_pretrained(folder)
        if self.processor is not None:
            # Some processors have their own template, which supports other modalities or none.
            self.processor.chat_template = self.processor.tokenizer.chat_template
            self.processor.save_pretrained(folder)
        for name, text in self.files.items():
            (folder / name).write_text(text)


def model_of(kind: type[PreTrainedModel], **fields: Any) -> PreTrainedModel:
    """Return a model of a class, with these fields in its configuration."""
    config = kind.config_class(
        architectures=[kind.__name__], tie_word_embeddings=False, dtype="bfloat16", **fields
    )
    return kind(config)


def text_config(vocabulary: Vocabulary, **more: Any) -> dict[str, Any]:
    """Return the configuration of a text model with two layers."""
    return {
        "vocab_size": vocabulary.size,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        # vLLM's CPU attention supports heads of size 64, not of size 16.
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "bos_token_id": vocabulary.id(START),
        "eos_token_id": vocabulary.id(END),
        **more,
    }


def vision_config(**more: Any) -> dict[str, Any]:
    """Return the configuration of a vision tower with two layers, with usual field names."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **more,
    }
