"""Models with an encoder that vLLM cannot run apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tools.up.encoders import REGISTRY, text_architectures, why_unservable

TEXT = frozenset({"LlamaForCausalLM", "T5ForConditionalGeneration"})
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "accepts only text (LlamaForCausalLM)"),
        (WHISPER, "is an encoder-decoder model (WhisperForConditionalGeneration)"),
        ({"architectures": WHISPER["architectures"]}, "is an encoder-decoder model"),
        ({"model_type": "new", "is_encoder_decoder": True}, "is an encoder-decoder model (new)"),
        ({"architectures": ["New"], "text_config": {"is_encoder_decoder": True}}, "(New)"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "accepts only text"),
    ],
)
def test_models_without_a_separate_encoder_are_named(
    config: Mapping[str, Any], reason: str
) -> None:
    assert reason in str(why_unservable(config, TEXT))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}},
        {"architectures": ["SomethingNew"], "model_type": "llama"},
        {"architectures": ["LlamaForCausalLM", "SomethingNew"]},
        # One class for both: the configuration has the encoder's part, or not.
        {"architectures": ["LlamaForCausalLM"], "mm_vision_tower": "clip"},
        {"architectures": ["LlamaForCausalLM"], "audio_config": {}},
        {"architectures": ["LlavaForConditionalGeneration"], "is_encoder_decoder": False},
    ],
)
def test_a_doubt_is_left_to_vllm(config: Mapping[str, Any]) -> None:
    assert why_unservable(config, TEXT) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["architectures", "model_type", "layer_types", "text_config", "thinker_config"]
            ),
            inner,
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["architectures", "text_config", "layer_types"]), values))
def test_no_configuration_is_an_error(config: dict[str, Any]) -> None:
    assert why_unservable(config, TEXT) is None


def test_the_list_of_models_is_read_without_vllm(tmp_path: Path) -> None:
    assert text_architectures(tmp_path) == frozenset()
    file = tmp_path / REGISTRY
    file.parent.mkdir(parents=True)
    file.write_text(
        '_TEXT_GENERATION_MODELS = {"A": ("a", "A"), "B": ("b", "B"), **x}\n'
        '_MULTIMODAL_MODELS = {"B": ("b", "B")}\n'
    )
    assert text_architectures(tmp_path) == {"A"}
    file.write_text("import (")
    assert text_architectures(tmp_path) == frozenset()
