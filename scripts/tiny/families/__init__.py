"""The families of tiny models.

Each is imported when it is built: to see that a model is there already needs no transformers.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.tiny.model import TinyModel

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "tiny-qwen2.5-vl": "qwen2_5_vl.build",
        "tiny-qwen2-audio": "qwen2_audio.build",
        "tiny-qwen2.5-omni": "qwen_omni.qwen2_5_omni",
        "tiny-qwen3-omni": "qwen_omni.qwen3_omni",
        "tiny-paddleocr-vl": "paddleocr_vl.build",
        "tiny-paligemma": "paligemma.build",
        "tiny-pixtral": "pixtral.build",
    }
)
"""The module and the function that build a model, by the name of its directory."""


def build(name: str) -> "TinyModel":
    """Build the model of this name."""
    module, _, function = FAMILIES[name].partition(".")
    builder: Callable[[], TinyModel] = getattr(import_module(f"{__name__}.{module}"), function)
    return builder()
