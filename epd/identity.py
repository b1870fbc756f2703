"""The `uuid` we give an mm item, which vLLM keys its encoder cache by.

vLLM takes a `uuid` as it is, without the model's name and without looking at the content
(`vllm/multimodal/processing/inputs.py`), so whoever names it decides which encoder output a
request gets. Ours is derived from the content alone; a client's own never goes through.
"""

import hashlib

from epd.media import Inline

VERSION = b"epd-content-1"


def content_key(modality: str, media: Inline) -> str:
    """The key of media that are in the request: 64 hexadecimal digits.

    It covers the base64 text, which stands for its bytes one to one once the engine's strict
    decoder has accepted it, and the declared media type, by which vLLM picks a video's decoder.
    """
    digest = hashlib.sha256()
    for part in (VERSION, modality.encode(), media.media_type.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    digest.update(media.base64.encode())
    return digest.hexdigest()
