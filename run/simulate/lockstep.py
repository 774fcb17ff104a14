"""How long a step of an expert-parallel group takes on paper: sizes of the published model, and of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actors.balancers.placement import Placement
from run.simulate.routing import Floats

NODE_RANKS = 8


@dataclass(frozen=True)
class Sizes:
    """Of DeepSeek-V4.1-Flash's backbone (spec/model.md §1, §7); draft stages are left out."""

    num_layers: int = 40
    num_experts: int = 384
    num_picks: int = 6
    hidden_size: int = 5120
    intermediate_size: int = 2304
    expert_bytes: int = 18_800_640
    """Three matrices in FP4, a scale of one byte for 32 weights."""

    dense_bytes: int = 8_298_430_464
    """What a rank reads besides experts: attention, shared experts, routers in a byte a weight, the head in two."""

    sent_bytes: int = 5120 + 5120 // 32 + 2 * 5120
    """To an expert and back, for each pick of a row: FP8 with its scales there, BF16 back."""

    @property
    def expert_flops(self) -> int:
        """Operations of one expert for one row."""
        return 6 * self.hidden_size * self.intermediate_size

    def cache_bytes(self, context: int) -> int:
        """What a row reads of its request's KV in all layers: index keys, what they choose, the window (spec/model.md
        §7)."""
        scanned = (5 * context // 2 + 4 * min(16_384, context)) * 68
        return scanned + 38 * 288 * min(512, context) + self.num_layers * 528 * min(128, context)


@dataclass(frozen=True)
class Machine:
    """What ranks run on: an H200 each, as its data sheet says, eight to a node with a 400 Gb/s link each."""

    hbm_tb_s: float = 4.8
    """What a rank reads of its memory in a second."""

    memory_gb: float = 141.0
    """Of a rank."""

    tflops: float = 1979.0
    """FP8 without sparsity. FP4 weights are expanded to FP8 on their way: there is no FP4 arithmetic."""

    nvlink_gb_s: float = 450.0
    """In one direction, to ranks of the same node."""

    link_gbit_s: float = 400.0
    """In one direction, to ranks of other nodes."""

    reached: float = 0.8
    """Part of these that kernels reach: an assumption."""

    overhead_us: float = 50.0
    """Of a layer: launches of its kernels, and twice the way through the network. An assumption."""

    read_gb_s: float = 5.0
    """What a rank loads experts with that move, from the checkpoint: 3FS gives a node 40 GiB/s at best."""

    plan_ms: float = 220.0
    """What planning a layer that is uneven takes, as measured at EP 64 and 128."""


class Ranks(NamedTuple):
    """What one layer asks of each rank, `[steps, ranks]`: rows for its experts, and how many of these have any."""

    rows: Floats
    touched: Floats


def ranks_of(loads: Floats, placement: Placement) -> Ranks:
    """Of `loads [steps, experts]`; rows of an expert take turns at its copies."""
    slots = np.array(placement.slots)
    copies = np.array([len(of_expert) for of_expert in placement.copies])
    number = np.zeros_like(slots)  # of the copies of an expert, which one a slot is
    for of_expert in placement.copies:
        for place, (rank, slot) in enumerate(of_expert):
            number[rank, slot] = place
    in_slots = loads[:, slots]
    return Ranks((in_slots / copies[slots]).sum(axis=2), (in_slots > number).sum(axis=2).astype(np.float64))


class Parts(NamedTuple):
    """Where the time of a step goes, in seconds: of one layer, or of all."""

    attention_s: float
    experts_s: float
    exchange_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        return sum(self)


def layer_parts(ranks: Ranks, num_rows: int, context: int, sizes: Sizes, machine: Machine) -> Parts:
    """A layer's time, mean over the steps, with `num_rows` rows of each rank's own.

    All wait for the slowest: for the rank whose experts take longest, arithmetic or weights, and for the one that
    sends or gets most; neither is hidden behind the other. Attention, everything else that a rank computes for its own
    rows, takes as long as what it reads, on each.
    """
    byte_s = 1e-12 / (machine.reached * machine.hbm_tb_s)
    row_s = 1e-12 * sizes.expert_flops / (machine.reached * machine.tflops)
    ep_size = ranks.rows.shape[1]
    experts_s = np.maximum(ranks.touched * sizes.expert_bytes * byte_s, ranks.rows * row_s).max(axis=1)
    sent = np.maximum(ranks.rows.max(axis=1), num_rows * sizes.num_picks) * sizes.sent_bytes
    near = min(ep_size, NODE_RANKS)
    links = (
        1e-9 * (near - 1) / ep_size / machine.nvlink_gb_s,
        8e-9 * (ep_size - near) / ep_size / machine.link_gbit_s,
    )
    own_bytes = sizes.dense_bytes + num_rows * sizes.cache_bytes(context)
    return Parts(
        own_bytes / sizes.num_layers * byte_s,
        float(experts_s.mean()),
        float(sent.mean()) * max(links) / machine.reached,
        machine.overhead_us / 1e6,
    )
