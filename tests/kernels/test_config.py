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
