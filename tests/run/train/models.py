"""The untrained model as training reads it, and conversations of random tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from kernels.config import ModelConfig
from kernels.vocabulary import TokenMap, load_token_map
from run.train.backbone import Backbone
from run.train.packing import Batch, pack
from run.train.parameters import Parameters, read
from run.train.rendering import Sample
from tests.untrained import untrained


class Loaded(NamedTuple):
    config: ModelConfig
    token_map: TokenMap
    parameters: Parameters
    backbone: Backbone


@functools.cache
def loaded() -> Loaded:
    config = ModelConfig.from_folder(untrained())
    token_map = load_token_map(untrained(), config)
    return Loaded(config, token_map, read(untrained(), config), Backbone(config, token_map.pad))


def sample(num: int, seed: int = 0, num_targets: int | None = None) -> Sample:
    """`num` random tokens of text, the last `num_targets` of them (by default all) to be produced."""
    tokens = np.random.default_rng(seed).integers(3, 900, num).astype(np.uint16)
    targets = np.zeros(num, dtype=bool)
    targets[-(num if num_targets is None else num_targets) :] = True
    return Sample(tokens, targets, [])


def batch(*rows: list[Sample], columns: int, region: int | None = None, cut: int | None = None) -> Batch:
    cuts = [cut for _ in rows]
    return pack(rows, columns, columns if region is None else region, loaded().token_map, cuts, loaded().config)


def hidden(of: Batch) -> torch.Tensor:
    """[B, region, D] fp32, as a loader's weights give it."""
    with torch.no_grad():
        return loaded().backbone.forward(loaded().parameters, of, None, select=True, probe=0).hidden
