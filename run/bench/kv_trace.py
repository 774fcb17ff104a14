"""Prefix hits on a trace of real requests, with the real keys, table and reclaim, against what could be hit at all.

Tokens of answers are not stored: the trace names them in the prompts that come after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.kvstore.reclaim import Reclaim
from actors.rules.blocks import BlockTable
from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES, chain, root
from actors.rules.hit import usable_blocks
from actors.rules.keys import keys as as_keys
from run.simulate.traces import SUB_BLOCKS, read_trace

BUDGETS = (0.01, 0.1, 0.5, 1.0)
NUM_BOUNDED = 2000
"""Bounded stores are tried with the first requests only, and are parts of all the blocks that these have."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Request:
    """When it came, how long its prompt was, and the keys of its complete blocks, one after the other."""

    at_s: float
    num_tokens: int
    keys: bytes

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


def measure_trace(path: Path, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Hits as parts of all prefix blocks: the most there can be by the trace's own blocks, and ours, without a bound
    and at `BUDGETS`. Raises TraceError."""
    arrivals = read_trace(path)
    num_rounds = 2 + len(BUDGETS)
    requests = []
    for number, arrival in enumerate(arrivals):
        requests.append(Request(arrival.at_s, arrival.num_tokens, b"".join(chain(_ROOT, arrival.tokens()))))
        progress(number / len(arrivals) / num_rounds)
    found: dict[str, Any] = {
        "trace_requests": len(requests),
        "trace_blocks": sum(map(len, requests)),
        "hit_ratio_optimum": _optimum([arrival.blocks[::SUB_BLOCKS] for arrival in arrivals]),
        **_unbounded(requests),
        "bounded_requests": min(len(requests), NUM_BOUNDED),
        "hit_ratio_bounded": {},
    }
    progress(2 / num_rounds)
    requests = requests[:NUM_BOUNDED]
    num_all = len(np.unique(np.concatenate([as_keys(request.keys) for request in requests]), axis=0))
    for number, part in enumerate(BUDGETS, 3):
        found["hit_ratio_bounded"][str(part)] = _bounded(requests, max(1, int(num_all * part)))
        progress(number / num_rounds)
    return found


_ROOT = root("trace")


def _optimum(prompts: list[tuple[int, ...]]) -> float:
    """Of the trace's own blocks, incomplete ones too: those seen before, up to the first one that was not."""
    seen: set[int] = set()
    num_hit = 0
    for ids in prompts:
        num_hit += next((i for i, id in enumerate(ids) if id not in seen), len(ids))
        seen.update(ids)
    return round(num_hit / sum(map(len, prompts)), 4)


def _unbounded(requests: list[Request]) -> dict[str, float]:
    """Blocks that are there, and the tokens that need not be computed for them, with windows at hand."""
    table = BlockTable()
    num_hit = num_cached = 0
    for request in requests:
        keys = as_keys(request.keys)
        num_present = _num_first(table.find(keys)[1])
        num_hit += num_present
        num_cached += usable_blocks(num_present, request.num_tokens) * BLOCK_TOKENS
        table.put(keys, np.zeros(len(keys), dtype=np.uint64))
    return {
        "hit_ratio": round(num_hit / sum(map(len, requests)), 4),
        "cached_token_ratio": round(num_cached / sum(request.num_tokens for request in requests), 4),
    }


def _bounded(requests: list[Request], num_slots: int) -> float:
    """With room for `num_slots` blocks: what does not fit any more drives out what reclaim says."""
    reclaim = Reclaim()
    num_hit = 0
    for request in requests:
        keys = as_keys(request.keys)
        num_present = _num_first(reclaim.find(keys)[1])
        num_hit += num_present
        reclaim.touched(keys[:num_present][-1:], request.at_s)
        parents = np.concatenate((as_keys(_ROOT), keys))[num_present : len(keys)]
        locations = np.zeros(len(parents), dtype=np.uint64)
        reclaim.stored(keys[num_present:], parents, locations, request.at_s)
        reclaim.victims(reclaim.num_blocks - num_slots)
    return round(num_hit / sum(map(len, requests)), 4)


def _num_first(there: npt.NDArray[np.bool_]) -> int:
    """How many are there in a row from the first one."""
    return len(there) if there.all() else int(there.argmin())
