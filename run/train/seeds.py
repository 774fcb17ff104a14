"""Random states of examples: one per split, task and index, so that held-out examples are never those trained on."""

from __future__ import annotations

import hashlib
import random
from typing import Literal

Split = Literal["train", "held-out"]


def rng(split: Split, task: str, index: int) -> random.Random:
    """The random state that makes example `index` of a task; the same arguments always give the same state."""
    # str seeds would do, but only a hash spelt out here keeps the data the same across versions of Python.
    digest = hashlib.sha256(f"{split}/{task}/{index}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
