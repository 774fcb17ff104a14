"""The image tower and the encoder that runs it; golden numbers: tests/oracle."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.checkpoint import CheckpointError
from kernels.config import ConfigError, ModelConfig
from kernels.encoder import LocalEncoder
from kernels.engine import Encoder, Pixels
from kernels.vision import VisionEncoder, load_vision
from tests.conftest import Run
from tests.kernels.conftest import GOLDEN
from tests.kernels.vision_set import FOLDER, NUM_IMAGES, golden


@pytest.fixture(scope="module")
def vision() -> VisionEncoder:
    return load_vision(FOLDER)


def pixels(image: int) -> Pixels:
    return golden()[f"img{image}.resized_rgb"].numpy()


def test_every_part_of_the_image_is_read(vision: VisionEncoder) -> None:
    """Attention reaches from any patch to any cell, and where a patch stands matters."""
    image = pixels(1)
    whole = vision.encode(image)
    for row, column in [(0, 0), (69, 139), (40, 70)]:
        changed = image.copy()
        changed[row, column] ^= 255
        assert (vision.encode(changed) != whole)[1:5].any(1).all()
    upside = vision.encode(image[::-1].copy())
    assert not torch.allclose(whole.sum(0), upside.sum(0), atol=1e-3)


def test_threads_and_other_images_change_no_bit(vision: VisionEncoder) -> None:
    alone = [vision.encode(pixels(image)) for image in range(NUM_IMAGES)]
    torch.set_num_threads(2)
    again = [vision.encode(pixels(image)) for image in reversed(range(NUM_IMAGES))]
    assert all(torch.equal(one, two) for one, two in zip(alone, reversed(again), strict=True))


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (np.zeros((28, 28, 3), np.float32), "uint8"),
        (np.zeros((28, 28), np.uint8), "uint8"),
        (np.zeros((28, 28, 4), np.uint8), "uint8"),
        (np.zeros((28, 27, 3), np.uint8), "multiples of 14"),
        (np.zeros((0, 28, 3), np.uint8), "multiples of 14"),
        (np.zeros((14 * 3 * 20, 14 * 3, 3), np.uint8), "exceed 40 tokens"),
    ],
)
def test_what_is_no_image(vision: VisionEncoder, image: Pixels, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        vision.encode(image)


def vision_only(folder: Path) -> Path:
    """A checkpoint of which only the tensors of the tower are there."""
    weights = load_file(FOLDER / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name.startswith(("vision.", "aligner.", "image_"))}
    save_file(kept, folder / "model.safetensors")
    shutil.copy(FOLDER / "config.json", folder)
    return folder


def test_no_text_weight_is_asked_for(tmp_path: Path, vision: VisionEncoder) -> None:
    assert torch.equal(load_vision(vision_only(tmp_path)).encode(pixels(0)), vision.encode(pixels(0)))


def test_the_encoder_returns_rows_of_each_image(run_async: Run, vision: VisionEncoder) -> None:
    async def main() -> None:
        encoder: Encoder = LocalEncoder(FOLDER)
        with pytest.raises(RuntimeError, match="not started"):
            await encoder.encode([pixels(0)])
        await encoder.start()
        assert await encoder.encode([]) == []
        found = await encoder.encode([pixels(image) for image in (2, 0, 2)])
        for rows, image in zip(found, (2, 0, 2), strict=True):
            want = vision.encode(pixels(image)).numpy()
            assert np.array_equal(np.frombuffer(rows, "<f4").reshape(-1, want.shape[1]), want)
        with pytest.raises(ValueError, match="multiples"):
            await encoder.encode([pixels(0), pixels(0)[1:]])
        await encoder.close()
        await encoder.close()
        with pytest.raises(RuntimeError, match="closed"):
            await encoder.encode([pixels(0)])

    run_async(main())


def test_a_cancelled_call_leaves_the_encoder_usable(run_async: Run) -> None:
    async def main() -> None:
        encoder = LocalEncoder(FOLDER)
        await encoder.start()
        call = asyncio.ensure_future(encoder.encode([pixels(3)] * 50))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await encoder.encode([pixels(0)])) == 1
        await encoder.close()

    run_async(main())


def test_a_folder_without_a_tower_is_named(tmp_path: Path, run_async: Run) -> None:
    with pytest.raises(ConfigError, match="vision_config is missing"):
        LocalEncoder(GOLDEN / "mini")
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        LocalEncoder(tmp_path)
    weights = load_file(vision_only(tmp_path) / "model.safetensors")
    del weights["vision.blocks.1.norm2.weight"]
    save_file(weights, tmp_path / "model.safetensors")

    async def main() -> None:
        encoder = LocalEncoder(tmp_path)
        with pytest.raises(CheckpointError, match=r"vision\.blocks\.1\.norm2\.weight"):
            await encoder.start()
        await encoder.close()

    run_async(main())


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("patch_size", 0, "vision_config.patch_size must be positive"),
        ("patch_size", "14", "vision_config.patch_size must be int"),
        ("patch_size", None, "vision_config.patch_size must be int"),
        ("num_attention_heads", 3, "vision_config.hidden_size must be"),
        ("max_image_tokens", 3, "vision_config.max_image_tokens must be at least 4"),
        ("max_wh_ratio", 0.5, "vision_config.max_wh_ratio must be"),
        ("min_pixels", float("inf"), "vision_config.min_pixels must be int"),
    ],
)
def test_a_wrong_key_of_the_tower_is_named(tmp_path: Path, key: str, value: object, named: str) -> None:
    keys = json.loads((FOLDER / "config.json").read_text())
    keys["vision_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image_token_id": None}, "image_token_id is missing"),
        ({"image_token_id": 192}, "image_token_id is not in the vocabulary"),
        ({"vision_config": {}}, "vision_config.num_hidden_layers is missing"),
        ({"vision_config": 3}, "vision_config must be"),
    ],
)
def test_a_tower_needs_its_keys(tmp_path: Path, change: dict[str, object], named: str) -> None:
    keys = json.loads((FOLDER / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_folder(tmp_path)


def test_without_a_tower_there_is_no_image_token() -> None:
    config = ModelConfig.from_folder(GOLDEN / "mini")
    assert config.vision is None and config.image_token_id is None
