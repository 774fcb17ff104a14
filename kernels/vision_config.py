"""The configuration of the image tower, and of the sizes that images are brought to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kernels.keys import ConfigError
from kernels.published import VISION_LIMITS


@dataclass(frozen=True)
class VisionConfig:
    """The keys of `vision_config` (spec §1.1) under their published names: the image tower and the image sizes."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def check(self) -> None:
        """Raises ConfigError naming the key."""

        def need(holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"vision_config.{what}")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            need(field.name in ("min_pixels", "max_wh_ratio") or value > 0, f"{field.name} must be positive")
        for name, most in VISION_LIMITS.items():
            need(getattr(self, name) <= most, f"{name} must be at most {most:,}")
        need(self.min_pixels >= 0, "min_pixels must not be negative")
        need(self.max_wh_ratio is None or self.max_wh_ratio >= 1, "max_wh_ratio must be null or at least 1")
        need(self.hidden_size % (4 * self.num_attention_heads) == 0, "hidden_size must be heads times a multiple of 4")
        need(self.max_image_tokens >= 4, "max_image_tokens must be at least 4")  # start, one image row of two, end
