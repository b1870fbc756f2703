"""LoRA adapters of tiny models, and chat templates that refuse some requests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ADAPTER = "tiny-adapter"
"""Name under which the consumers of a stack serve the adapter."""

RANK = 8


def write_adapter(model: Path, folder: Path) -> Path:
    """Write an adapter of a model's language model in the format of PEFT, and return its folder."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(layers):
        place = f"base_model.model.model.language_model.layers.{layer}.self_attn.q_proj"
        weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
        weights[f"{place}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**adapter, "bias": "none"}))
    return folder


def write_template(model: Path, file: Path) -> Path:
    """Write a model's chat template with a refusal of user messages without text.

    It also refuses the argument `refuse`, as templates do with values that they do not support.
    With the argument `strict`, it refuses conversations without a system message.
    """
    own = (model / "chat_template.jinja").read_text()
    refusal = """\
{%- for message in messages if message.role == "user" and message.content is not string %}
{%- if message.content | selectattr("type", "equalto", "text") | list | length == 0 %}
{{- raise_exception("a user message needs text") }}
{%- endif %}
{%- endfor %}
{%- if refuse is defined and refuse %}{{- raise_exception("refuse is set") }}{%- endif %}
{%- if strict is defined and strict and messages[0].role != "system" %}
{{- raise_exception("a conversation needs a system message") }}
{%- endif %}
"""
    file.write_text(refusal + own)
    return file
