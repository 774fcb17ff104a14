"""Sizes against the published table; bad images get a typed error or a right answer."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from actors.vision import images
from actors.vision.images import ImageError, plan, prepare
from kernels.vision_config import VisionConfig

TABLE: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "image_sizing.json").read_text())


def config(**keys: Any) -> VisionConfig:
    tower = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    return VisionConfig(**(tower | {"rope_theta": 10000.0} | TABLE["full_config"] | keys))


FULL = config()
TINY = config(**TABLE["tiny_config"])
SETTINGS = {"full": FULL, "full_max_wh_ratio_4": config(max_wh_ratio=4.0), "tiny": TINY}


def encode(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def shapes(mode: str = "RGB", size: tuple[int, int] = (120, 90)) -> Image.Image:
    """A red disc on blue: recognisable after any resize."""
    image = Image.new("RGB", size, (0, 51, 204))
    ImageDraw.Draw(image).ellipse((size[0] // 4, size[1] // 4, 3 * size[0] // 4, 3 * size[1] // 4), (204, 51, 0))
    return image.convert(mode)


def center(pixels: np.ndarray) -> list[int]:
    height, width, _ = pixels.shape
    return [int(value) for value in pixels[height // 2, width // 2]]


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, body: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.oracle
@pytest.mark.parametrize("name", SETTINGS)
def test_published_sizes(name: str) -> None:
    for row in TABLE[name]:
        got = plan(row["w"], row["h"], SETTINGS[name])
        assert (got.width, got.height) == (row["resized_w"], row["resized_h"]), row
        assert (got.num_columns, got.num_rows, got.num_tokens) == (row["llm_w"], row["llm_h"], row["tokens"]), row


@given(
    st.integers(1, 10**8),
    st.integers(1, 10**8),
    st.sampled_from([4, 5, 6, 7, 40, 183, 1024]),
    st.sampled_from([(14, 3), (14, 1), (16, 2)]),
    st.sampled_from([0, 3600, 295936]),
    st.sampled_from([None, 1.0, 4.0]),
)
def test_a_plan_fits(
    width: int, height: int, most: int, grid: tuple[int, int], least: int, wh_ratio: float | None
) -> None:
    patch, ratio = grid
    keys = {"patch_size": patch, "downsample_ratio": ratio, "min_pixels": least, "max_wh_ratio": wh_ratio}
    got = plan(width, height, config(max_image_tokens=most, **keys))
    assert got.num_tokens == got.num_rows * (got.num_columns + 1) + 2 <= most
    assert got.width % patch == got.height % patch == 0
    cell = patch * ratio
    assert 0 < got.width <= got.num_columns * cell < got.width + cell
    assert 0 < got.height <= got.num_rows * cell < got.height + cell


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_no_plan_for_nothing(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="empty"):
        plan(*size, FULL)


def test_letterbox_keeps_the_proportions_on_gray() -> None:
    prepared = prepare(encode(Image.new("RGB", (300, 60), (255, 0, 0)), "PNG"), TINY)
    assert prepared.pixels.shape == (70, 308, 3) and prepared.pixels.dtype == np.uint8
    assert prepared.pixels[0, 0].tolist() == prepared.pixels[-1, -1].tolist() == [127, 127, 127]
    assert (prepared.pixels[10:60] == [255, 0, 0]).all()


def test_beyond_the_ratio_it_is_stretched() -> None:
    red = encode(Image.new("RGB", (300, 50), (255, 0, 0)), "PNG")
    stretched = prepare(red, config(**TABLE["tiny_config"], max_wh_ratio=4.0))
    assert stretched.plan.width / stretched.plan.height < 5 and (stretched.pixels == [255, 0, 0]).all()
    assert not (prepare(red, TINY).pixels == [255, 0, 0]).all()


def test_the_digest_names_the_pixels() -> None:
    first = prepare(encode(shapes(), "PNG"), TINY)
    again = prepare(encode(shapes(), "PNG", compress_level=1), TINY)
    other = prepare(encode(shapes(size=(121, 90)), "PNG"), TINY)
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 32 and int(first.digest, 16) >= 0


FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "P", {"transparency": bytes(range(256))}),
    ("JPEG", "RGB", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "CMYK", {}),
    ("GIF", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (120, 90))]}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("WEBP", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (120, 90))]}),
    ("PNG", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (120, 90))]}),
]


@pytest.mark.parametrize(("form", "mode", "options"), FORMS)
def test_every_form_shows_the_same_picture(form: str, mode: str, options: dict[str, Any]) -> None:
    """Of an animation the first frame: the others are black."""
    want = prepare(encode(shapes(), "PNG"), TINY)
    got = prepare(encode(shapes(mode), form, **options), TINY)
    assert got.plan == want.plan
    assert np.abs(got.pixels.astype(int) - want.pixels).mean() < 8
    assert np.abs(np.array(center(got.pixels)) - center(want.pixels)).max() < 30


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_gray_becomes_rgb(mode: str) -> None:
    pixels = prepare(encode(Image.new("L", (60, 60), 255).convert(mode), "PNG"), TINY).pixels
    assert (pixels == 255).all()


def test_16_bits_are_scaled_not_saturated() -> None:
    ramp = np.tile(np.arange(0, 65536, 512, dtype=np.uint16), (90, 1))
    gray = prepare(encode(Image.fromarray(ramp), "PNG"), TINY).pixels
    assert abs(center(gray)[0] - 128) <= 4 and gray[gray.shape[0] // 2, -2, 0] > 245
    color = b"".join(b"\0" + struct.pack(">HHH", 0xC800, 0x1E00, 0x0A00) * 90 for _ in range(90))
    header = struct.pack(">IIBBBBB", 90, 90, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(color)) + chunk(b"IEND", b"")
    assert center(prepare(b"\x89PNG\r\n\x1a\n" + body, TINY).pixels) == [0xC8, 0x1E, 0x0A]


def test_as_published_alpha_and_orientation_are_dropped() -> None:
    clear = Image.new("RGBA", (60, 60), (9, 8, 7, 0))
    assert center(prepare(encode(clear, "PNG"), TINY).pixels) == [9, 8, 7]
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    assert prepare(encode(shapes(size=(300, 60)), "JPEG", exif=exif), TINY).plan.width == 308


def test_a_name_or_a_large_exif_does_not_matter() -> None:
    """What an image is says its first bytes; there is no name to be wrong."""
    exif = Image.Exif()
    exif[0x9286] = b"x" * 60_000
    plain, laden = encode(shapes(), "JPEG"), encode(shapes(), "JPEG", exif=exif)
    assert prepare(plain, TINY).digest == prepare(laden, TINY).digest


GIF_BOMB = (  # its frame is one pixel
    b"GIF89a" + struct.pack("<HHBBB", 50_000, 50_000, 0, 0, 0)
    + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00\x3b"
)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "text": (b"hello, I am an image", "not an image in one of the formats PNG, JPEG, GIF, WEBP"),
    "svg": (SVG, "not an image in one"),
    "bmp": (encode(shapes(), "BMP"), "not an image in one"),
    "tiff": (encode(shapes(), "TIFF"), "not an image in one"),
    "pdf": (encode(shapes(), "PDF"), "not an image in one"),
    "ico": (encode(shapes(), "ICO"), "not an image in one"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in one"),
    "png signature only": (b"\x89PNG\r\n\x1a\n", "image"),
    "png, half": (encode(shapes(), "PNG")[:200], "cannot be decoded"),
    "png, cut header": (encode(shapes(), "PNG")[:20], "image"),
    "jpeg, half": (encode(shapes(), "JPEG")[:1200], "cannot be decoded"),
    "gif, half": (encode(shapes(), "GIF")[:-60], "image"),
    "webp, half": (encode(shapes(), "WEBP")[:300], "image"),
    "png, bad checksum": (encode(shapes(), "PNG").replace(b"IDAT", b"IDAT\0", 1), "image"),
    "png of no width": (png(0, 5, b""), "image"),
    "png, 50,000 squared": (png(50_000, 50_000, b"\0"), "pixels"),
    "png, just beyond the limit": (png(8_000, 6_251, b"\0"), "8000 x 6251 pixels, at most 50000000"),
    "gif, 50,000 squared": (GIF_BOMB, "pixels"),
    "png of a line": (encode(Image.new("RGB", (1, 100_000)), "PNG"), "1 x 100000 pixels is too thin"),
    "png of a line, lying": (encode(Image.new("RGB", (100_000, 1)), "PNG"), "100000 x 1 pixels is too thin"),
    "too many bytes": (encode(shapes(), "PNG") + bytes(images.MAX_ENCODED_BYTES), "bytes, at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_typed_error(name: str) -> None:
    data, why = BAD[name]
    with pytest.raises(ImageError, match=why):
        prepare(data, FULL)


def test_repeated_scans_are_refused() -> None:
    """75 bytes of a scan cost a pass over all pixels; thousands of them fit into a small file."""
    data = encode(shapes(), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match="scans"):
        prepare(data[:-2] + last * 100 + data[-2:], FULL)


@given(st.binary(max_size=40), st.integers(0, 2000), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]))
def test_damaged_bytes_never_raise_anything_else(noise: bytes, where: int, form: str) -> None:
    data = GOOD[form]
    where %= len(data)
    try:
        prepared = prepare(data[:where] + noise + data[where + len(noise) :], TINY)
    except ImageError:
        return
    assert prepared.plan.num_tokens <= TINY.max_image_tokens
    assert prepared.pixels.shape == (prepared.plan.height, prepared.plan.width, 3)


GOOD = {form: encode(shapes(size=(40, 30)), form) for form in images.FORMATS}
