"""The images of a body: taken out before the library sees it, and put into the prompt when their sizes are known."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from actors.recipe.card import ModelCard
from actors.recipe.fetch import MAX_URL_BYTES
from actors.recipe.fields import Refusal
from actors.recipe.parts import HONOURED, parts
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.vision import Image, ImageResolved

MAX_IMAGES = 64
"""In one request."""

KINDS = {
    Protocol.CHAT_COMPLETIONS: "image_url",
    Protocol.RESPONSES: "input_image",
    Protocol.MESSAGES: "image",
    Protocol.COUNT_TOKENS: "image",
}
"""The type of an image block in each protocol."""

_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WebP",
}
_MAGIC = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "GIF": re.compile(rb"GIF8"),
    "WebP": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
_DATA_URL = re.compile(r"data:([^;,]*+)[^,]*;base64,", re.IGNORECASE)  # repeats no group: that takes memory
_NO_HOST = re.compile(r"[\x00-\x20\x7f<>^|]")
"""What no name of a server holds."""

_SPACE = re.compile(r"[ \t\r\n\f]+")
_MARKER = "data:image/png;base64,"
_NO_FILES = "files are not kept here: send the image itself, in base64"


@dataclass(frozen=True)
class Source:
    """One image of a body: the path of its field, and the file, or the `url` where it is."""

    path: str
    data: bytes = b""
    url: str = ""

    def refusal(self, failure: Failure) -> Refusal:
        """Why it is not served, in terms of the request."""
        if failure.code is Code.NO_RESPONDERS:
            return Refusal(Code.NO_REPLICA, "no vision replica is there to look at the image", self.path)
        return Refusal(failure.code, f"{self.path}: {failure.message}", self.path)


def take_images(protocol: Protocol, body: dict[str, Any], card: ModelCard) -> tuple[list[Source], list[str]]:
    """The images of a body in its order, and the ignored fields of theirs. Each is replaced, in the body, by a marker
    that holds its number. Raises Refusal naming the path of what is no image that can be served.
    """
    kind, sources, ignored, role = KINDS[protocol], list[Source](), list[str](), ""
    for place, path, part in parts(body):
        if place != "content[]":
            role = str(part.get("role", "")) if place in ("messages[]", "input[]") else role
            continue
        if part.get("type") != kind:
            _check_no_image(path, part, kind, card)
            continue
        if not card.has_vision:
            raise Refusal(Code.UNSUPPORTED, f"{path}: {card.name} is a text-only checkpoint; remove the image", path)
        if role == "assistant" or path.startswith("system"):
            raise Refusal(Code.BAD_REQUEST, f"{path}: an image cannot stand here", path)
        _check_only_image(protocol, path, part)
        if len(sources) == MAX_IMAGES:
            raise Refusal(Code.BAD_REQUEST, f"{path}: a request may hold {MAX_IMAGES} images", path)
        marker = base64.b64encode(b"%d" % len(sources)).decode()
        source, has_detail = _TAKE[kind](path, part, marker)
        sources.append(source)
        if has_detail:
            ignored.append("content[].image_url.detail")
    return sources, ignored


def files_of(sources: Sequence[Source], fetched: Mapping[str, bytes | Failure]) -> list[bytes]:
    """The files of these images, given what was fetched from their URLs. Raises Refusal.

    An image that nobody waited for any more is not what the request failed for, if it can be helped.
    """
    files, refusals = list[bytes](), list[Refusal]()
    for source in sources:
        file = fetched[source.url] if source.url else source.data
        if isinstance(file, Failure):
            refusals.append(source.refusal(file))
        elif source.url and not any(magic.match(file) for magic in _MAGIC.values()):
            message = f"{source.path}: the URL gives no {', '.join(_MAGIC)}: give the URL of the image itself"
            refusals.append(Refusal(Code.BAD_REQUEST, message, source.path))
        else:
            files.append(file)
    for refusal in sorted(refusals, key=lambda refusal: refusal.failure.code is Code.CANCELLED):
        raise refusal
    return files


def split(
    sources: Sequence[Source], found: Sequence[ImageResolved | Failure]
) -> tuple[list[ImageResolved], Refusal | None]:
    """What vision replicas hold for us of these images, and why the request is refused, if one was no image."""
    failed = [source.refusal(one) for source, one in zip(sources, found, strict=True) if isinstance(one, Failure)]
    return [one for one in found if isinstance(one, ImageResolved)], next(iter(failed), None)


def number_of(marker: str | None) -> int:
    """The number of the image that a marker stands for; -1 if it is none."""
    try:
        return int(base64.b64decode((marker or "").removeprefix(_MARKER), validate=True))
    except ValueError:
        return -1


def expand(
    tokens: npt.NDArray[np.uint32], image_token: int, sources: Sequence[Source], resolved: Sequence[ImageResolved]
) -> tuple[npt.NDArray[np.uint32], list[Image]]:
    """The prompt with each image token repeated for all positions of its image, and where the images begin."""
    positions = np.flatnonzero(tokens == image_token)
    if not len(positions) == len(sources) == len(resolved):
        raise Refusal(Code.INTERNAL, f"{len(positions)} places for {len(sources)} images in the prompt")
    repeats = np.ones(len(tokens), dtype=np.int64)
    repeats[positions] = [image.num_tokens for image in resolved]
    starts = (np.cumsum(repeats) - repeats)[positions]
    images = [
        Image(
            start=int(start),
            num_tokens=image.num_tokens,
            digest=image.digest,
            width=image.width,
            height=image.height,
            vision=image.vision,
            pixels=image.pixels,
            num_patches=image.num_patches,
        )
        for start, image in zip(starts, resolved, strict=True)
    ]
    return np.repeat(tokens, repeats), images


def check_room(images: Sequence[Image], sources: Sequence[Source], num_tokens: int, limit: int) -> None:
    """Raise Refusal naming the image with which a prompt of `num_tokens` no longer fits into the context."""
    if num_tokens < limit:
        return
    for image, source in zip(images, sources, strict=True):
        if image.start + image.num_tokens >= limit:
            of_images = sum(image.num_tokens for image in images)
            raise Refusal(
                Code.CONTEXT_LENGTH,
                f"This model's maximum context length is {limit} tokens. However, your prompt has {num_tokens} tokens, "
                f"{of_images} of them for images: {source.path} does not fit. Please send fewer or smaller images.",
                source.path,
            )


def _check_no_image(path: str, part: dict[str, Any], kind: str, card: ModelCard) -> None:
    """Refuse a block of another type that is, or holds, an image: it would be dropped unseen."""
    if part.get("type") in KINDS.values():
        if not card.has_vision:
            raise Refusal(Code.UNSUPPORTED, f"{path}: {card.name} is a text-only checkpoint; remove the image", path)
        message = f"{path}.type {part['type']!r} is not of this protocol: an image is {kind!r} here"
        raise Refusal(Code.BAD_REQUEST, message, f"{path}.type")
    for name in ("image_url", "source"):
        if part.get(name) is not None:
            raise Refusal(Code.BAD_REQUEST, f"unknown field '{path}.{name}'", f"{path}.{name}")


def _check_only_image(protocol: Protocol, path: str, part: dict[str, Any]) -> None:
    """Refuse what blocks of other types hold, and the library would drop from this one."""
    for name in HONOURED[protocol]["content[]"] - {"type", "image_url", "source"}:
        if part.get(name) is not None:
            raise Refusal(Code.BAD_REQUEST, f"unknown field '{path}.{name}'", f"{path}.{name}")


def _take_chat(path: str, part: dict[str, Any], marker: str) -> tuple[Source, bool]:
    where = f"{path}.image_url"
    image = _object(where, part.get("image_url"), {"url", "detail"})
    source = _from_url(where, image.get("url"))
    part["image_url"] = {**image, "url": _MARKER + marker}
    return source, image.get("detail") is not None


def _take_responses(path: str, part: dict[str, Any], marker: str) -> tuple[Source, bool]:
    where = f"{path}.image_url"
    source = _from_url(where, part.get("image_url"))
    part["image_url"] = _MARKER + marker
    return source, False


def _take_messages(path: str, part: dict[str, Any], marker: str) -> tuple[Source, bool]:
    where = f"{path}.source"
    source = _object(where, part.get("source"), {"type", "media_type", "data", "url", "file_id"})
    kind = source.get("type")
    if kind == "file":
        raise Refusal(Code.UNSUPPORTED, f"{where}: {_NO_FILES}", where)
    if kind == "url":
        taken = _at_url(where, source.get("url"))
    elif kind == "base64" and isinstance(source.get("data"), str):
        taken = Source(where, _decode(where, str(source.get("media_type")), source["data"]))
    else:
        message = f"{where} must be of type 'base64', with media_type and data, or of type 'url', with url"
        raise Refusal(Code.BAD_REQUEST, message, where)
    part["source"] = {"type": "base64", "media_type": "image/png", "data": marker}
    return taken, False


_TAKE = {"image_url": _take_chat, "input_image": _take_responses, "image": _take_messages}


def _object(where: str, value: Any, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(Code.BAD_REQUEST, f"{where} must be an object", where)
    for name in value:
        if name not in names:
            raise Refusal(Code.BAD_REQUEST, f"unknown field '{where}.{name[:64]}'", f"{where}.{name[:64]}")
    return value


def _from_url(where: str, url: Any) -> Source:
    """The image of a data URL, or one to be fetched."""
    head = _DATA_URL.match(url) if isinstance(url, str) else None
    if head is None:
        return _at_url(where, url)
    return Source(where, _decode(where, head[1], url[head.end() :]))


def _at_url(where: str, url: Any) -> Source:
    """An image to be fetched."""
    if not isinstance(url, str):
        raise Refusal(Code.BAD_REQUEST, f"{where}: the URL of the image is missing", where)
    if not url[:8].lower().startswith(("http://", "https://")):
        message = f"{where} must be an http or https URL, or where one is taken a data URL in base64"
        raise Refusal(Code.BAD_REQUEST, message, where)
    if (num_bytes := len(url.encode(errors="replace"))) > MAX_URL_BYTES:
        raise Refusal(Code.BAD_REQUEST, f"{where}: the URL has {num_bytes} bytes, at most {MAX_URL_BYTES}", where)
    if not _has_server(url):
        raise Refusal(Code.BAD_REQUEST, f"{where}: the URL names no server, or no port of one", where)
    return Source(where, url=url)


def _has_server(url: str) -> bool:
    """Whether an http or https URL can lead anywhere, read as the fetcher does: any slashes before the server, of
    either kind."""
    try:
        parts = urlsplit("//" + url.replace("\\", "/").partition(":")[2].lstrip("/"))
        host = unquote(parts.hostname or "")
        return host != "" and parts.port != 0 and not _NO_HOST.search(host)
    except ValueError:  # a port that is none, brackets without an address
        return False


def _decode(where: str, mime: str, text: str) -> bytes:
    declared = _FORMATS.get(mime.lower())
    if declared is None:
        known = ", ".join(_FORMATS)
        raise Refusal(Code.BAD_REQUEST, f"{where}: {mime[:64]!r} is not a type of image taken here: {known}", where)
    text = _SPACE.sub("", text)
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(Code.BAD_REQUEST, f"{where}: the data is not valid base64", where) from None
    found = next((name for name, magic in _MAGIC.items() if magic.match(data)), None)
    if found is not None and found != declared:
        raise Refusal(Code.BAD_REQUEST, f"{where}: the type is {mime!r}, but the data is a {found}", where)
    return data
