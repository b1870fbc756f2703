"""Builders of chat requests."""

import base64
import struct
from typing import Any

Part = dict[str, Any]


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int) -> bytes:
    """Return the beginning of a PNG of this size, as far as it names it."""
    header = b"IHDR" + struct.pack(">2L5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">L", 13) + header + bytes(4 + 4) + b"IDAT"


def image(content: bytes | str = b"picture", **more: Any) -> Part:
    url = content if isinstance(content, str) else data_url(content)
    return {"type": "image_url", "image_url": {"url": url}, **more}


def video(content: bytes = b"film") -> Part:
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}}


def audio_url(content: bytes = b"sound") -> Part:
    return {"type": "audio_url", "audio_url": {"url": data_url(content, "audio/wav")}}


def input_audio(content: bytes = b"sound") -> Part:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text(words: str = "what is it?") -> Part:
    return {"type": "text", "text": words}


def request(*parts: Part | str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}
