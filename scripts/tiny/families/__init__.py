"""Families of tiny models.

A family's module is imported when its model is built. The check for an existing model needs no
transformers.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.tools.models.model import TinyModel

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "tiny-qwen2-vl": "epd.tools.models.qwen_vl.qwen2_vl",
        "tiny-qwen2.5-vl": "epd.tools.models.qwen_vl.qwen2_5_vl",
        "tiny-qwen3-vl": "epd.tools.models.qwen_vl.qwen3_vl",
        "tiny-qwen3.5": "epd.tools.models.qwen_vl.qwen3_5",
        "tiny-internvl": "internvl.build",
        "tiny-gemma3": "gemma3.build",
        "tiny-gemma4": "gemma4.build",
        "tiny-llava": "llava.llava",
        "tiny-llava-onevision": "llava.llava_onevision",
        "tiny-pixtral": "mistral.pixtral",
        "tiny-mistral3": "mistral.mistral3",
        "tiny-idefics3": "idefics3.idefics3",
        "tiny-smolvlm": "idefics3.smolvlm",
        "tiny-glm4v": "glm4v.build",
        "tiny-llama4": "llama4.build",
        "tiny-paddleocr-vl": "paddleocr_vl.build",
        "tiny-paligemma": "paligemma.build",
        "tiny-qwen2-audio": "qwen2_audio.build",
        "tiny-qwen2.5-omni": "qwen_omni.qwen2_5_omni",
        "tiny-qwen3-omni": "qwen_omni.qwen3_omni",
        "tiny-audioflamingo3": "audioflamingo3.build",
        "tiny-voxtral": "voxtral.build",
    }
)
"""Module and function that build a model, by the name of its directory."""


def build(name: str) -> "TinyModel":
    module, _, function = FAMILIES[name].rpartition(".")
    module = module if "." in module else f"{__name__}.{module}"
    builder: Callable[[], TinyModel] = getattr(import_module(module), function)
    return builder()
