import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.flops import prefill_flops
from kernels.model import Model
from tests.kernels.conftest import GOLDEN


def spent(model: Model, pool: StatePool, num_tokens: int, *, replay: bool) -> int:
    slot = pool.alloc()
    if replay:
        pool.plan_replay(slot, num_tokens)
    of_numpy = [0]

    def counted(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(a: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
            of_numpy[0] += 2 * a.size * b.shape[-1]
            return product(a, b, *rest)

        return call

    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as of_torch:
        for name in ("dot", "matmul"):
            patch.setattr(np, name, counted(getattr(np, name)))
        hidden = model.forward(Batch.last_rows([(slot, 0, [7] * num_tokens)]), pool)
        model.logits(hidden)
    pool.free(slot)
    return int(of_torch.get_total_flops()) + of_numpy[0]


def test_replay_leaves_the_decoder_out(mini: Model, pool: StatePool) -> None:
    spent(mini, pool, 200, replay=True), spent(mini, pool, 200, replay=False)  # probes of products are run once
    counted = [prefill_flops(mini.config, 200, replay=replay) for replay in (True, False)]
    measured = [spent(mini, pool, 200, replay=replay) for replay in (True, False)]
    # Whole tiles and picks that see nothing are computed too, so a pass spends more than it must, in either way.
    assert counted[0] < measured[0] and counted[1] < measured[1]
    assert abs(counted[0] / counted[1] - measured[0] / measured[1]) < 0.05
    assert counted[0] / counted[1] < 0.7


def test_a_short_prompt_costs_the_same(mini: Model) -> None:
    assert prefill_flops(mini.config, 16, replay=True) == prefill_flops(mini.config, 16, replay=False)


def test_the_published_size() -> None:
    """16.13 billion weights take part in one token, 7.86 of them up to the decoder and in Engram (spec §10)."""
    text = {
        "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
        "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6, "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20], "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_vocab_size": 16000000,
        "engram_n_heads": 8, "engram_head_dim": 256, "engram_compressed_vocab_size": 99092,
    }  # fmt: skip
    top = json.loads((GOLDEN / "mini" / "config.json").read_text())
    config = ModelConfig.from_keys({**top, "text_config": {**top["text_config"], **text}})
    assert config.first_decoder_layer == 20
    one = prefill_flops(config, 1, replay=True)
    assert one / 2e9 == pytest.approx(16.13, rel=0.01)
    decoder = prefill_flops(config, 128, replay=False) - prefill_flops(config, 127, replay=False)
    more = prefill_flops(config, 1025, replay=True) - prefill_flops(config, 1024, replay=True)
    assert decoder > 1.8 * more > 2 * 7.86e9
    ratios = [prefill_flops(config, n, replay=True) / prefill_flops(config, n, replay=False) for n in (512, 8192)]
    assert 0.6 < ratios[0] < 0.65 and 0.45 < ratios[1] < 0.53
