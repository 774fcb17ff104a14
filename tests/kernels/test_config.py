import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.config import ConfigError, ModelConfig
from tests.kernels.conftest import GOLDEN


def keys() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / "mini" / "config.json").read_text())
    return loaded


QUANTIZED: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}


def quantized(**changes: Any) -> dict[str, Any]:
    return {**QUANTIZED, **changes}


@pytest.mark.parametrize(
    "said",
    [None, quantized(), quantized(fmt="e4m3"), quantized(expert_dtype=None)]
    + [{name: value for name, value in QUANTIZED.items() if name not in ("activation_scheme", "expert_dtype")}],
)
def test_quantisation_as_published_or_not_said(said: dict[str, Any] | None) -> None:
    ModelConfig.from_keys({**keys(), "quantization_config": said})


def test_what_a_vision_tower_has_too_many_of() -> None:
    config: dict[str, Any] = json.loads((GOLDEN / "mini-vision" / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 10**9
    with pytest.raises(ConfigError, match=r"vision_config\.num_hidden_layers must be at most"):
        ModelConfig.from_keys(config)


def test_roles_of_the_layers() -> None:
    config = ModelConfig.from_folder(GOLDEN / "mini")
    assert [role.mode for role in config.layers] == (
        ["window", "window", "full", "reuse", "full", "reuse", "full", "reuse", "reindex", "reuse"]
    )
    assert [role.kv_owner for role in config.layers] == [None, None, 2, 2, 4, 4, 6, 6, 6, 6]
    assert [role.index_owner for role in config.layers] == [None, None, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [role.layer for role in config.kv_owners] == [2, 4, 6]
    assert [role.engram for role in config.layers[:5]] == [None, 0, None, None, 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["text_config"].pop("head_dim"), "text_config.head_dim is missing"),
        (lambda c: c.pop("eos_token_id"), "eos_token_id is missing"),
        (lambda c: c["text_config"].update(hidden_size="96"), "text_config.hidden_size must be int"),
        (lambda c: c["text_config"].update(scoring_func="softmax"), "text_config.scoring_func must be 'sqrtsoftplus'"),
        (lambda c: c["text_config"]["rope_scaling"].pop("factor"), "text_config.rope_scaling.factor is missing"),
        (lambda c: c["text_config"]["rope_scaling"].update(rope_type="linear"), "rope_type must be 'yarn'"),
        (lambda c: c["text_config"].update(compress_ratios=[0, 2]), "text_config.compress_ratios has fewer"),
        (lambda c: c["text_config"].update(kv_source_layer_ids=[4, 6]), "kv_source_layer_ids: none for layer 2"),
        (lambda c: c["text_config"].update(head_dim=48), "text_config.head_dim must be a multiple of 32"),
        (lambda c: c["text_config"].update(o_groups=0), "text_config.o_groups must be positive"),
        (lambda c: c["text_config"].update(sliding_window=-1), "text_config.sliding_window must be positive"),
        (lambda c: c["text_config"]["rope_scaling"].update(beta_fast=0), "text_config.rope_scaling.beta_fast"),
        (lambda c: c["text_config"].update(rms_norm_eps=-1), "text_config.rms_norm_eps"),
        (lambda c: c["text_config"].update(engram_pad_token_id=-1), "engram_pad_token_id is not in the vocabulary"),
        (lambda c: c["text_config"].update(index_source_layer_ids=[2, 4, 6, 99]), "index_source_layer_ids must name"),
        (lambda c: c.update(bos_token_id=256), "bos_token_id is not in the vocabulary"),
        (lambda c: c["text_config"].update(candidate_topk_blocks=4), "text_config.candidate_topk_blocks"),
        *[
            (lambda c, layer=layer: c["text_config"].update(candidate_source_layer_id=layer), "candidate_source_layer")
            for layer in (4, 7, 8, -1, 10**9)  # of ratio 2; owning nothing; owning an index only; no layers
        ],
        (lambda c: c.update(model_type="llama"), "model_type must be 'deepseek_v41', not 'llama'"),
        (lambda c: c.update(architectures=["A"]), "architectures must be ['DeepseekV41ForCausalLM'], not ['A']"),
        (lambda c: c["text_config"].update(hidden_act=[[[0]]] * 99), "hidden_act must be 'silu', not [[[0]]"),
        (lambda c: c["text_config"].update(model_type="x"), "text_config.model_type must be 'deepseek_v41_text'"),
        (lambda c: c.update(vision_config={"model_type": "x"}), "vision_config.model_type must be 'deepseek"),
        (lambda c: c.update(quantization_config=["fp8"]), "quantization_config must be an object"),
        *[
            (lambda c, key=key: c.update(quantization_config=quantized(**{key: "x"})), f"quantization_config.{key} ")
            for key in (*QUANTIZED, "fmt", "modules_to_not_convert")
        ],
        (lambda c: c.update(quantization_config={"\ud800": 1}), "quantization_config.\\ud800 is not known here"),
        (lambda c: c.update(quantization_config={}), "quantization_config.quant_method is missing"),
        *[
            (lambda c, key=key: c["text_config"].update({key: 10**9}), f"text_config.{key} must be at most")
            for key in ("hc_sinkhorn_iters", "n_routed_experts", "num_hidden_layers", "max_position_embeddings")
        ],
        *[
            (lambda c, key=key: c["text_config"].update({key: 10**9}), f"text_config.{key} must be at most")
            for key in ("num_nextn_predict_layers", "dspark_n_routed_experts", "dspark_block_size", "sliding_window")
        ],
        (lambda c: c["text_config"].update(engram_n_heads=0), "text_config.engram_n_heads must be positive"),
        (lambda c: c["text_config"].update(hidden_size=10**400), "text_config.hidden_size is out of range"),
        (lambda c: c["text_config"].update(rope_theta=10**400), "text_config.rope_theta is out of range"),
        (lambda c: c["text_config"].update(rms_norm_eps=float("inf")), "text_config.rms_norm_eps is out of range"),
        (lambda c: c["text_config"].update(routed_scaling_factor=float("nan")), "scaling_factor is out of range"),
        (lambda c: c["text_config"].update(compress_ratios=[10**400] * 13), "compress_ratios is out of range"),
        (lambda c: c.update(eos_token_id=-(10**400)), "eos_token_id is out of range"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    config = keys()
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_folder(tmp_path)
    assert named in str(error.value) and "config.json" in str(error.value)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_no_usable_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
