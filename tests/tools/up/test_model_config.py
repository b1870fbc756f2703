"""Facts that are read from a model's configuration before its engines start."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tools.up import model_config as reading
from epd.tools.up.model_config import (
    config_path,
    read_config,
    text_architectures,
    why_unservable,
)
from epd.tools.up.vllm_flags import flag_value, overrides_config

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


@pytest.mark.parametrize(
    "flag",
    ["--hf-overrides", "--hf_overrides={}", "--hf-overrides.text_config.a", "--config=f.yaml"],
)
def test_flags_after_which_the_file_does_not_describe_the_model(flag: str) -> None:
    assert overrides_config(["--enforce-eager", flag])
    assert not overrides_config(["--enforce-eager", "--dtype", "bfloat16"])


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], None),
        (["--revision"], None),
        (["--revision", "a"], "a"),
        (["--revision=a", "--x", "--revision", "b", "--y"], "b"),
        (["--revision", "a", "--revision=b=c"], "b=c"),
        (["--code-revision", "a"], None),
    ],
)
def test_the_last_value_of_a_flag_counts(flags: list[str], value: str | None) -> None:
    assert flag_value(flags, "--revision") == value


def test_the_configuration_of_a_folder_is_its_file(tmp_path: Path) -> None:
    assert read_config(config_path(str(tmp_path), (), {})) is None
    file = tmp_path / "config.json"
    for text, expected in (("{", None), ("[]", None), ('{"a": 1}', {"a": 1}), ("\xff", None)):
        file.write_bytes(text.encode("latin-1"))
        assert read_config(config_path(str(tmp_path), (), {})) == expected


def test_the_hub_is_queried_only_for_names_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))

    def fetched(model: str, revision: str | None) -> Path:
        asked.append((model, revision))
        return tmp_path / "config.json"

    monkeypatch.setattr(reading, "_fetched", fetched)
    assert read_config(config_path("s3://bucket/model", (), {})) is None
    assert read_config(config_path("a/model", (), {"VLLM_USE_MODELSCOPE": "True"})) is None
    assert read_config(config_path("a/model", ("--revision=b",), {})) == {"a": 1}
    assert asked == [("a/model", "b")]


def test_the_list_of_models_is_read_without_vllm(tmp_path: Path) -> None:
    assert text_architectures(tmp_path) == frozenset()
    file = tmp_path / reading.REGISTRY
    file.parent.mkdir(parents=True)
    file.write_text(
        '_TEXT_GENERATION_MODELS = {"A": ("a", "A"), "B": ("b", "B"), **x}\n'
        '_MULTIMODAL_MODELS = {"B": ("b", "B")}\n'
    )
    assert text_architectures(tmp_path) == {"A"}
    file.write_text("import (")
    assert text_architectures(tmp_path) == frozenset()
