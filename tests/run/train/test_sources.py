"""Where the next token stands already: what heads and indexers are held to."""

from __future__ import annotations

import numpy as np
import torch

from run.train import attention
from run.train.sources import sources
from tests.run.train.models import batch, loaded, sample


def found(tokens: list[int], num_targets: int) -> list[int]:
    targets = np.zeros(len(tokens), dtype=bool)
    targets[-num_targets:] = True
    return sources(np.array(tokens, dtype=np.uint16), targets).tolist()


def test_the_place_whose_past_agrees_longest_is_the_source() -> None:
    # "a b 7", "c b 8", then "c b" asks for the 8, "a b" for the 7
    note = [10, 20, 7, 11, 20, 8]
    assert found([*note, 11, 20, 8], 1) == [-1] * 7 + [5, -1]
    assert found([*note, 10, 20, 7], 1) == [-1] * 7 + [2, -1]


def test_of_equals_the_latest_is_taken_and_of_many_that_agree_in_nothing_none() -> None:
    assert found([1, 5, 2, 5, 3, 5], 1)[4] == 3
    assert found([1, 5, 2, 5, 3, 5, 4, 5], 1)[6] == -1
    assert found([1, 2, 9], 1)[1] == -1


def test_only_targets_have_sources_and_rows_know_their_columns() -> None:
    one = sample(20, 1, num_targets=3)
    one.tokens[-3:] = one.tokens[4:7]
    of = batch([one], columns=64)
    begin = int(of.lowest[0, -1])
    assert of.sources[0, begin + 16 : begin + 19].tolist() == [begin + 4, begin + 5, begin + 6]
    assert int((of.sources >= 0).sum()) == 3


def test_guided_heads_lose_by_what_they_do_not_give() -> None:
    share = torch.zeros(1, 3, 2, 8)
    share[0, 0, :, 5], share[0, 1, 0, 2] = 0.5, 1.0
    total, num = attention._missed(share, torch.tensor([[5, 2, -1]]))
    assert int(num) == 2
    assert torch.isclose(total, -2 * torch.tensor(0.501).log())


def test_guidance_reaches_the_heads_and_the_indexer() -> None:
    parameters = {name: value.clone().requires_grad_() for name, value in loaded().parameters.items()}
    one = sample(120, 2, num_targets=40)
    one.tokens[-40:] = one.tokens[20:60]
    of = batch([one], columns=128)
    found = loaded().backbone.forward(parameters, of, None, select=False, probe=0, guide=True)
    torch.stack(found.guide_loss).sum().backward()
    assert len(found.guide_loss) == 2
    grads = {name for name, value in parameters.items() if value.grad is not None and bool(value.grad.any())}
    assert {"layers.5.attn.wq_b.weight", "layers.7.attn.wq_b.weight", "layers.4.attn.compressor.wkv.weight"} <= grads
    without = loaded().backbone.forward(loaded().parameters, of, None, select=False, probe=0)
    assert not without.guide_loss and without.index_loss[1].item() < found.index_loss[1].item()
