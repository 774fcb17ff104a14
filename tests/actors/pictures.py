"""Image files, and bodies of the three protocols that hold them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from schemas.api import Protocol
from schemas.bulk import Handle
from schemas.vision import ImageResolved

HANDLE = Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0)


def picture(color: str = "red", width: int = 40, height: int = 30, format: str = "PNG") -> bytes:
    """The file of an image in one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, format)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{in_base64(data)}"


def block(protocol: Protocol, data: bytes, mime: str = "image/png") -> dict[str, Any]:
    """An image as a content block of the protocol."""
    if protocol is Protocol.CHAT_COMPLETIONS:
        return {"type": "image_url", "image_url": {"url": data_url(data, mime)}}
    if protocol is Protocol.RESPONSES:
        return {"type": "input_image", "image_url": data_url(data, mime)}
    return {"type": "image", "source": {"type": "base64", "media_type": mime, "data": in_base64(data)}}


def at(protocol: Protocol, url: Any) -> dict[str, Any]:
    """An image at a URL as a content block of the protocol."""
    if protocol is Protocol.CHAT_COMPLETIONS:
        return {"type": "image_url", "image_url": {"url": url}}
    if protocol is Protocol.RESPONSES:
        return {"type": "input_image", "image_url": url}
    return {"type": "image", "source": {"type": "url", "url": url}}


def text(protocol: Protocol, words: str) -> dict[str, Any]:
    """Text as a content block of the protocol."""
    return {"type": "input_text" if protocol is Protocol.RESPONSES else "text", "text": words}


def body_of(protocol: Protocol, *blocks: Any, **fields: Any) -> dict[str, Any]:
    """A request of one user's message with these blocks: text, or the bytes of images."""
    parts = [text(protocol, item) if isinstance(item, str) else item for item in blocks]
    parts = [block(protocol, item) if isinstance(item, bytes) else item for item in parts]
    name = "input" if protocol is Protocol.RESPONSES else "messages"
    return {"model": "tiny", name: [{"role": "user", "content": parts}], **fields}


def resolved(num_tokens: int, digest: str = "d") -> ImageResolved:
    """What a vision replica might say."""
    return ImageResolved(vision="v0", digest=digest, width=42, height=42, num_tokens=num_tokens, pixels=HANDLE)
