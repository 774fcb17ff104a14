"""What a config.json must say of the kind of model it is: another value is another model, not an option."""

from __future__ import annotations

from collections.abc import Iterator
from reprlib import repr as short
from typing import Any

from kernels.keys import ConfigError

_TOP: dict[str, Any] = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_VISION: dict[str, Any] = {"model_type": "deepseek_v41_vision"}
_NEEDED: dict[str, Any] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
_QUANTIZATION: dict[str, Any] = {**_NEEDED, "activation_scheme": "dynamic", "fmt": "e4m3", "expert_dtype": "fp4"}

# Far more than any model has; what is larger would only take all time or memory before it is found not to fit.
TEXT_LIMITS = {
    "num_hidden_layers": 512,
    "n_routed_experts": 4096,
    "num_nextn_predict_layers": 64,
    "dspark_n_routed_experts": 4096,
    "dspark_block_size": 256,
    "hc_sinkhorn_iters": 1000,
    "sliding_window": 1 << 16,
    "max_position_embeddings": 1 << 26,
}
VISION_LIMITS = {"num_hidden_layers": 512}


def check_published(top: dict[str, Any]) -> None:
    """Hold the keys of the parsed `config.json` that are there against the published. Raises ConfigError naming one."""
    quantization = top.get("quantization_config")
    if not isinstance(quantization, dict | None):
        raise ConfigError(f"quantization_config must be an object, not {short(quantization)}")
    if quantization is not None:
        for key in quantization:
            if key not in _QUANTIZATION:
                raise ConfigError(f"quantization_config.{ascii(key)[1:-1]} is not known here")
        for key in _NEEDED:
            if key not in quantization:
                raise ConfigError(f"quantization_config.{key} is missing")
    for name, value, want in _held(top):
        if value != want:
            raise ConfigError(f"{name} must be {want!r}, not {short(value)}")


def _held(top: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    parts = (("text_config", _TEXT), ("vision_config", _VISION), ("quantization_config", _QUANTIZATION))
    for key, want in _TOP.items():
        if key in top:
            yield key, top[key], want
    for part, wanted in parts:
        keys = top.get(part)
        said: dict[str, Any] = keys if isinstance(keys, dict) else {}
        for key, want in wanted.items():
            if key in said and (said[key] is not None or key != "expert_dtype"):
                yield f"{part}.{key}", said[key], want
