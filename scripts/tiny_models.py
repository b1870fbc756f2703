"""Write two tiny multimodal models with seeded random weights, for tests and demos on a CPU.

    python scripts/tiny_models.py DIR

makes `DIR/tiny-qwen2.5-vl` (pictures, video) and `DIR/tiny-qwen2-audio`. Their answers are random
letters, but always the same ones for the same input, and they depend on each picture, each sound
and their order: a stage that loses, swaps or damages an encoder output changes the answer.

A model that this version of the script has already written is left alone.
"""

import argparse
import hashlib
import json
import shutil
import string
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

SEED = 15
STAMP = "made_by.sha256"
HIDDEN = 256
VOCABULARY = 320
LETTERS = (string.ascii_lowercase + " ").encode()
END = "<|im_end|>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
)
PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
CHAT_TEMPLATE = f"""
{{%- set placeholders = {json.dumps(PLACEHOLDERS)} -%}}
{{%- for message in messages -%}}
    {{{{- '<|im_start|>' + message.role + '\\n' -}}}}
    {{%- if message.content is string -%}}
        {{{{- message.content -}}}}
    {{%- else -%}}
        {{%- for part in message.content -%}}
            {{{{- part.text if part.type == 'text' else placeholders[part.type] -}}}}
        {{%- endfor -%}}
    {{%- endif -%}}
    {{{{- '{END}\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{- '<|im_start|>assistant\\n' -}}}}
{{%- endif -%}}
"""
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 4.0, "lm_head": 8.0}
"""Factors on 1/sqrt(fan-in). With sharp attention single patches count, where flat attention would
average all pictures to much the same; a loud `lm_head` keeps sampled tokens among the letters."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    # vLLM's CPU attention refuses heads of 16.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model, the prefixes vLLM wants for its weights, and its preprocessor's configuration."""

    model: PreTrainedModel
    prefixes: Mapping[str, str]
    preprocessors: Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Write both models below the directory named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, build in (("tiny-qwen2.5-vl", vision_model), ("tiny-qwen2-audio", audio_model)):
        if not is_current(directory / name):
            publish(build(), directory / name)
        print(directory / name)


def is_current(target: Path) -> bool:
    """Tell whether this version of the script has written the model."""
    stamp = target / STAMP
    return stamp.exists() and stamp.read_text() == digest()


def digest() -> str:
    """Identify this version of the script."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def publish(tiny: TinyModel, target: Path) -> None:
    """Write the model beside its place, then move it there: half a model is never seen."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        staging = Path(folder) / target.name
        write(tiny, staging)
        (staging / STAMP).write_text(digest())
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)


def write(tiny: TinyModel, folder: Path) -> None:
    """Write everything a vLLM needs to serve the model."""
    redraw(tiny.model)
    tiny.model.config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for file, config in tiny.preprocessors.items():
        (folder / file).write_text(json.dumps(config, indent=2))
    weights = dict(renamed(tiny.model.to(torch.bfloat16).state_dict(), tiny.prefixes))
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


def vision_model() -> TinyModel:
    """A tiny Qwen2.5-VL."""
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [8, 12, 12],
            },
            "bos_token_id": token_id("<|im_start|>"),
            "eos_token_id": token_id(END),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    preprocessor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 640 * 28 * 28},
        # Spelled out: vLLM normalises on its own, and takes what is absent for no normalisation.
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
    return TinyModel(
        Qwen2_5_VLForConditionalGeneration(config),
        {},
        {
            "preprocessor_config.json": {
                **preprocessor,
                "image_processor_type": "Qwen2VLImageProcessor",
            },
            "video_preprocessor_config.json": {
                **preprocessor,
                "video_processor_type": "Qwen2VLVideoProcessor",
            },
        },
    )


def audio_model() -> TinyModel:
    """A tiny Qwen2-Audio."""
    config = Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        text_config={**TEXT, "model_type": "qwen2", "eos_token_id": token_id(END)},
        audio_config={
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
        },
        audio_token_index=token_id("<|AUDIO|>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    preprocessor = {
        "processor_class": "Qwen2AudioProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
    }
    return TinyModel(
        Qwen2AudioForConditionalGeneration(config),
        {
            "lm_head.": "language_model.lm_head.",
            "model.language_model.": "language_model.model.",
            "model.": "",
        },
        {"preprocessor_config.json": preprocessor},
    )


def redraw(model: PreTrainedModel) -> None:
    """Draw every matrix anew; transformers' initial ones are so small that every input is alike."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
        elif parameter.ndim > 1:
            gain = GAINS.get(name.split(".")[-2], 1.0)
            std = gain / parameter[0].numel() ** 0.5
            parameter.data.normal_(std=std, generator=generator)
    silence = torch.ones(VOCABULARY, dtype=torch.bool)
    silence[list(LETTERS)] = False
    model.get_output_embeddings().weight.data[silence] = 0


def renamed(
    weights: Mapping[str, torch.Tensor], prefixes: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names vLLM knows."""
    for name, weight in weights.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        yield prefixes.get(old, "") + name.removeprefix(old), weight.contiguous()


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, numbered as the byte, then the special ones."""
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token=END, pad_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte.

    Printable bytes stand for themselves, the others for the letters from U+0100 on:
    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def token_id(token: str) -> int:
    """The number of a special token."""
    return 256 + SPECIAL_TOKENS.index(token)


if __name__ == "__main__":
    main()
