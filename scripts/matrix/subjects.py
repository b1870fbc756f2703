"""Models of the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.routing.instances import Role

E_PD, E_P_D = "1e1pd", "1e1p1d"
TOPOLOGIES = (E_PD, E_P_D)
PICTURE, VIDEO, SOUND = "picture", "video", "sound"


@dataclass(frozen=True, slots=True)
class Subject:
    """Model of the matrix.

    Attributes:
        name: name of its directory (`scripts.tiny.families`).
        family: models that it represents.
        modalities: modalities of its media.
        dtype: data type of its engines' computations.
        own: additional flags of its engines.
    """

    name: str
    family: str
    modalities: Sequence[str]
    dtype: str = "float32"
    own: Sequence[str] = ()

    def flags(self) -> dict[Role, Sequence[str]]:
        """Return the flags of its engines, in addition to those of every stack."""
        every = "--dtype", self.dtype, "--trust-request-mm-kwargs", *self.own
        return dict.fromkeys(Role, every)


SUBJECTS = (
    Subject("tiny-qwen2-vl", "Qwen2-VL", (PICTURE, VIDEO)),
    Subject("tiny-qwen2.5-vl", "Qwen2.5-VL", (PICTURE, VIDEO)),
    Subject("tiny-qwen3-vl", "Qwen3-VL", (PICTURE, VIDEO)),
    Subject("tiny-qwen3.5", "Qwen3.5", (PICTURE, VIDEO), dtype="bfloat16"),
    Subject("tiny-internvl", "InternVL", (PICTURE, VIDEO)),
    Subject("tiny-gemma3", "Gemma 3", (PICTURE,)),
    Subject("tiny-gemma4", "Gemma 4, without audio tower", (PICTURE, VIDEO)),
    Subject("tiny-llava", "LLaVA 1.5", (PICTURE,)),
    Subject("tiny-llava-onevision", "LLaVA-OneVision", (PICTURE, VIDEO)),
    Subject("tiny-pixtral", "Pixtral", (PICTURE,)),
    Subject("tiny-mistral3", "Mistral 3", (PICTURE,)),
    Subject("tiny-idefics3", "Idefics3", (PICTURE,)),
    Subject("tiny-smolvlm", "SmolVLM", (PICTURE,)),
    Subject("tiny-glm4v", "GLM-4.1V", (PICTURE, VIDEO)),
    Subject("tiny-llama4", "Llama 4", (PICTURE,)),
    Subject("tiny-paddleocr-vl", "PaddleOCR-VL", (PICTURE,)),
    Subject("tiny-paligemma", "PaliGemma", (PICTURE,)),
    Subject("tiny-qwen2-audio", "Qwen2-Audio", (SOUND,)),
    Subject("tiny-qwen2.5-omni", "Qwen2.5-Omni", (PICTURE, VIDEO, SOUND)),
    Subject("tiny-qwen3-omni", "Qwen3-Omni", (PICTURE, VIDEO, SOUND)),
    Subject("tiny-audioflamingo3", "Audio-Flamingo-3", (SOUND,)),
    Subject("tiny-voxtral", "Voxtral", (SOUND,), own=("--tokenizer-mode", "mistral")),
)
"""Models, in the order of the table."""
