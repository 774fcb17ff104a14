"""Images of requests: how large the model wants them, and their bytes turned into those pixels (spec §9).

What the published preparation leaves undone is left undone here too, so that the model sees what it was trained on: an
alpha channel is dropped, not composited; the EXIF orientation and colour profiles are not applied; of an animation the
first frame counts. One thing differs: 16-bit grey is scaled to 8 bits, where that preparation saturates to white.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from kernels.vision_config import VisionConfig

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_ENCODED_BYTES = 8 * 1024 * 1024
MAX_PIXELS = 50_000_000  # decoding and converting take 8 bytes for each
MAX_SCANS = 64  # of a progressive JPEG: a scan is a few bytes in the file and a pass over all pixels to decode
_GRAY = (127, 127, 127)
_REVISION = b"shoal-image-1"  # of what prepare makes of the same bytes; raise it whenever that changes


class ImageError(ValueError):
    """Bytes that cannot be turned into an image for the model; the message says why, in words for a client."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size in pixels that an image is brought to, and its grid of tokens.

    `num_tokens` counts the whole span: start, a newline behind each of the `num_rows` rows, end.
    """

    width: int
    height: int
    num_rows: int
    num_columns: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the image tower reads: `pixels` uint8 [height, width, 3], RGB; `digest`, 32 hex digits, names them."""

    pixels: npt.NDArray[np.uint8]
    plan: Plan
    digest: str


def plan(width: int, height: int, config: VisionConfig) -> Plan:
    """The size for an image of `width` x `height` pixels, both positive. At most `max_image_tokens` tokens."""
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels is empty")
    patch, wide, high = config.patch_size, float(width), float(height)
    if config.max_wh_ratio is not None and wide > high * config.max_wh_ratio:
        wide = high * config.max_wh_ratio
    if wide * high < config.min_pixels:
        scale = (config.min_pixels / (wide * high)) ** 0.5
        wide, high = int(wide * scale), int(high * scale)
    columns, rows = math.ceil(wide / patch), math.ceil(high / patch)
    if _num_tokens(columns, rows, config) > config.max_image_tokens:
        columns, rows = _shrink(wide, high, config)
    ratio, num_tokens = config.downsample_ratio, _num_tokens(columns, rows, config)
    return Plan(columns * patch, rows * patch, -(-rows // ratio), -(-columns // ratio), num_tokens)


def prepare(data: bytes, config: VisionConfig) -> Prepared:
    """Decode the bytes of a PNG, JPEG, GIF or WebP file and bring it to the size of its `plan`.

    Empty margins are gray. Takes at most some 10 bytes of memory a pixel; releases the interpreter while it decodes
    and resizes. Raises ImageError.
    """
    image = _open(data)
    planned = plan(image.width, image.height, config)
    size = (planned.width, planned.height)
    # Kept in proportion, a line of pixels can vanish: a gray image would be an answer, a wrong one.
    if min(round(image.height / image.width * size[0]), round(image.width / image.height * size[1])) < 1:
        raise ImageError(f"an image of {image.width} x {image.height} pixels is too thin to be seen by the model")
    rgb = _to_rgb(image)
    if config.max_wh_ratio is not None and rgb.width >= config.max_wh_ratio * rgb.height:
        fitted = rgb.resize(size)
    else:
        fitted = ImageOps.pad(rgb, size, color=_GRAY)
    pixels = np.asarray(fitted)
    digest = hashlib.sha256(_REVISION + b"%d x %d" % size)
    digest.update(pixels.tobytes())
    return Prepared(pixels, planned, digest.hexdigest()[:32])


def _open(data: bytes) -> Image.Image:
    """The image of `data`, its header read and its pixels not yet."""
    if not data:
        raise ImageError("the image is empty")
    if len(data) > MAX_ENCODED_BYTES:
        raise ImageError(f"the image has {len(data)} bytes, at most {MAX_ENCODED_BYTES} are taken")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"not an image in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"the image has more than the {MAX_PIXELS} pixels that are taken") from None
    except Exception as error:  # a decoder raises whatever a damaged header trips it into
        raise ImageError(f"the image cannot be read: {error}") from None
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"the image has {image.width} x {image.height} pixels, at most {MAX_PIXELS} are taken")
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > MAX_SCANS:
        raise ImageError(f"the image has more than {MAX_SCANS} scans")
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """The pixels of the first frame, in mode RGB."""
    try:
        image.load()
        image.info.pop("transparency", None)  # dropped in any case; of palettes it would be warned about
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # as above, of damaged pixels
        raise ImageError(f"the image cannot be decoded: {error}") from None


def _num_tokens(columns: int, rows: int, config: VisionConfig) -> int:
    """Tokens of a grid of patches: each cell of them is one, and a newline ends each row."""
    ratio = config.downsample_ratio
    return -(-rows // ratio) * (-(-columns // ratio) + 1) + 2


def _shrink(width: float, height: float, config: VisionConfig) -> tuple[int, int]:
    """The largest grid of patches (columns, rows) in proportion to the image that has no more tokens than allowed."""
    ratio, most = config.downsample_ratio, config.max_image_tokens - 2
    cell = config.patch_size * ratio
    tallness = height / width
    columns = math.sqrt(most / tallness + 0.25) - 0.5
    rows = columns * tallness
    if columns < 1:
        return ratio, most // 2 * ratio
    if rows < 1:
        return (most - 1) * ratio, ratio
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    # Where a cell is one patch, rounding may leave nothing of it.
    return max(1, math.floor(width * scale / config.patch_size)), max(1, math.floor(height * scale / config.patch_size))
