"""The model's configuration, read from a checkpoint's config.json, and the role of every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

from kernels.keys import ConfigError as ConfigError
from kernels.keys import convert, convert_fields, parse
from kernels.published import TEXT_LIMITS, check_published
from kernels.vision_config import VisionConfig

# The draft stages' keys, and those of candidates and Engram, say nothing in a model that has none.
_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim"),
    *("q_lora_rank", "o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("swiglu_limit", "max_position_embeddings", "rope_theta", "compress_rope_theta", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters"),
)
_TOP_LEVEL = {name: name for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
_TOP_LEVEL["vision"] = "vision_config"


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed KV (spec §3.1)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LayerRole:
    """What one layer owns and reads (spec §0). `ratio` 0 means a sliding window only; owners are then None.

    `name` is the prefix of its tensors. Draft stages count on from the backbone's layers.
    """

    layer: int
    name: str
    ratio: int
    kv_owner: int | None
    index_owner: int | None
    engram: int | None  # position in `engram_layer_ids`
    mode: Literal["window", "full", "reindex", "reuse", "draft"]
    num_experts: int
    num_picks: int  # experts per token

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.layer

    @property
    def owns_index(self) -> bool:
        return self.index_owner == self.layer


@dataclass(frozen=True)
class ModelConfig:
    """The keys of `config.json` (spec §1.1) under their published names; units and meanings as there.

    `vision` is its `vision_config`. Without one there are no images, and `image_token_id` is None whatever the file
    says: that id is then a token like any other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder/config.json`. Raises ConfigError naming the file and the key that is missing or wrong."""
        path = Path(folder) / "config.json"
        try:
            top = parse(path.read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        if not isinstance(top, dict) or not isinstance(top.get("text_config"), dict):
            raise ConfigError(f"{path}: text_config is missing")
        try:
            return cls.from_keys(top)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_keys(cls, top: dict[str, Any]) -> ModelConfig:
        """Build from the parsed JSON object (with its `text_config`). Raises ConfigError naming the key."""
        text = top["text_config"]
        check_published(top)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            key = _TOP_LEVEL.get(field.name, field.name)
            source, name = (top, key) if field.name in _TOP_LEVEL else (text, f"text_config.{key}")
            if key not in source and field.default is not dataclasses.MISSING:
                continue
            if key not in source:
                raise ConfigError(f"{name} is missing")
            values[field.name] = _read(name, str(field.type), source[key])
        if values.get("vision") is None:
            values["image_token_id"] = None
        config = cls(**values)
        config._check()
        return config

    @cached_property
    def layers(self) -> tuple[LayerRole, ...]:
        """The role of each backbone layer, in order."""
        return tuple(self._role(layer) for layer in range(self.num_hidden_layers))

    @cached_property
    def draft_stages(self) -> tuple[LayerRole, ...]:
        """The role of each DSpark stage, in order; none when the checkpoint has no drafts (spec §8.1)."""
        experts, picks = self.dspark_n_routed_experts, self.dspark_num_experts_per_tok
        return tuple(
            LayerRole(self.num_hidden_layers + stage, f"mtp.{stage}", 0, None, None, None, "draft", experts, picks)
            for stage in range(self.num_nextn_predict_layers)
        )

    @property
    def kv_owners(self) -> tuple[LayerRole, ...]:
        """The layers that write compressed KV and index keys, in order."""
        return tuple(role for role in self.layers if role.owns_kv)

    @property
    def first_decoder_layer(self) -> int:
        """The last layer that writes compressed KV: from it on layers only read what it wrote (spec §5)."""
        return max((role.layer for role in self.kv_owners), default=self.num_hidden_layers)

    def _role(self, layer: int) -> LayerRole:
        ratio = self.compress_ratios[layer]
        engram = self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None
        name, experts, picks = f"layers.{layer}", self.n_routed_experts, self.num_experts_per_tok
        if ratio == 0:
            return LayerRole(layer, name, 0, None, None, engram, "window", experts, picks)
        kv_owner = max(owner for owner in self.kv_source_layer_ids if owner <= layer)
        index_owner = max(owner for owner in self.index_source_layer_ids if owner <= layer)
        mode: Literal["full", "reindex", "reuse"] = "reuse"
        if index_owner == layer:
            mode = "full" if kv_owner == layer else "reindex"
        return LayerRole(layer, name, ratio, kv_owner, index_owner, engram, mode, experts, picks)

    def _check(self) -> None:
        def need(holds: bool, what: str) -> None:
            if not holds:
                raise ConfigError(f"text_config.{what}")

        for name in _POSITIVE:
            need(getattr(self, name) > 0, f"{name} must be positive")
        for name, most in TEXT_LIMITS.items():
            need(getattr(self, name) <= most, f"{name} must be at most {most:,}")
        for name, value in vars(self.rope_scaling).items():
            need(value > 0, f"rope_scaling.{name} must be positive")
        need(self.rms_norm_eps >= 0 and self.hc_eps >= 0, "rms_norm_eps and hc_eps must not be negative")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ConfigError(f"{name} is not in the vocabulary")
        need(0 <= self.engram_pad_token_id < self.vocab_size, "engram_pad_token_id is not in the vocabulary")
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            need(all(0 <= layer < self.num_hidden_layers for layer in getattr(self, name)), f"{name} must name layers")
        need(len(self.compress_ratios) >= self.num_hidden_layers, "compress_ratios has fewer entries than layers")
        ratios = self.compress_ratios[: self.num_hidden_layers]
        need(set(ratios) <= {0, 1, 2}, "compress_ratios may hold 0, 1 and 2 only")
        need(self.head_dim % 32 == 0, "head_dim must be a multiple of 32")
        need(self.index_head_dim % 32 == 0, "index_head_dim must be a multiple of 32")
        rope = self.qk_rope_head_dim
        need(rope % 2 == 0 and rope <= self.head_dim, "qk_rope_head_dim must be even and at most head_dim")
        need(rope <= self.index_head_dim, "qk_rope_head_dim must be at most index_head_dim")
        need(self.num_attention_heads % self.o_groups == 0, "o_groups must divide num_attention_heads")
        need(self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts")
        if self.engram_layer_ids:
            for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim"):
                need(getattr(self, name) > 0, f"{name} must be positive")
            need(self.engram_max_ngram_size > 1, "engram_max_ngram_size must be at least 2")
        need(len(self.engram_num_embeddings) == len(self.engram_layer_ids), "engram_num_embeddings: one per layer")
        self._check_drafts(need)
        self._check_vision()
        first = next((layer for layer, ratio in enumerate(ratios) if ratio), None)
        if first is None:
            return
        need(min(self.kv_source_layer_ids, default=first + 1) <= first, f"kv_source_layer_ids: none for layer {first}")
        need(
            min(self.index_source_layer_ids, default=first + 1) <= first,
            f"index_source_layer_ids: none for layer {first}",
        )
        need(set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids), "kv_source_layer_ids must own an index")
        for role in self.layers:
            if role.kv_owner is not None:
                need(
                    self.compress_ratios[role.kv_owner] == role.ratio,
                    f"compress_ratios: layer {role.layer} reads the KV of layer {role.kv_owner}, of another ratio",
                )
        # The forced newest block may hold one visible row; with fewer candidates a masked row could be picked.
        reach = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
        reindexes = any(role.mode == "reindex" for role in self.layers)
        need(not reindexes or reach >= self.index_topk, "candidate_topk_blocks leaves fewer rows than index_topk")
        source = self.candidate_source_layer_id
        is_source = source in self.kv_source_layer_ids and self.compress_ratios[source] == 1
        need(not reindexes or is_source, "candidate_source_layer_id must name a layer that owns KV of ratio 1")

    def _check_drafts(self, need: Callable[[bool, str], None]) -> None:
        if not self.num_nextn_predict_layers:
            return
        need(self.dspark_block_size > 0, "dspark_block_size must be positive")
        need(self.dspark_markov_rank > 0, "dspark_markov_rank must be positive")
        need(0 <= self.dspark_noise_token_id < self.vocab_size, "dspark_noise_token_id is not in the vocabulary")
        need(
            0 < self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts,
            "dspark_num_experts_per_tok must be positive and at most dspark_n_routed_experts",
        )
        targets = self.dspark_target_layer_ids
        need(
            len(targets) > 0 and all(0 <= layer < self.num_hidden_layers for layer in targets),
            "dspark_target_layer_ids must name backbone layers",
        )

    def _check_vision(self) -> None:
        if self.vision is None:
            return
        self.vision.check()
        if self.image_token_id is None:
            raise ConfigError("image_token_id is missing")
        if not 0 <= self.image_token_id < self.vocab_size:
            raise ConfigError("image_token_id is not in the vocabulary")


def _read(name: str, kind: str, value: Any) -> Any:
    if kind == "RopeScaling" and isinstance(value, dict):
        if value.get("rope_type", "yarn") != "yarn":
            raise ConfigError(f"{name}.rope_type must be 'yarn', not {short(value['rope_type'])}")
        return RopeScaling(**convert_fields(name, RopeScaling, value))
    if kind == "VisionConfig | None" and isinstance(value, dict):
        return VisionConfig(**convert_fields(name, VisionConfig, value))
    return convert(name, kind, value)
