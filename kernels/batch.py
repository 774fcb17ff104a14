"""What one forward pass computes: a flat, ragged batch of tokens cut into per-request segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Images = Mapping[int, Sequence[tuple[int, npt.NDArray[np.float32]]]]
"""By slot: the position of each image's first token and its rows [num_tokens, hidden_size]."""


@dataclass(frozen=True)
class Segment:
    """`num_tokens` consecutive tokens of the request in `slot`, the first at position `start`.

    A prefill chunk, a decode row (one token) and a verification run (1 + k tokens) are all segments.
    """

    slot: int
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Batch:
    """Tokens `[num_tokens]` int64, their segments in order, and the flat `rows` whose hidden state is wanted.

    `images`: the first flat row and the rows [n, hidden_size] fp32 of each stretch that embeddings of images replace
    token embeddings in.
    """

    tokens: torch.Tensor
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]
    images: tuple[tuple[int, torch.Tensor], ...] = ()

    @classmethod
    def last_rows(cls, runs: Iterable[tuple[int, int, Sequence[int]]], images: Images | None = None) -> Batch:
        """A batch of `(slot, start, token ids)` runs that wants the last row of each run.

        Of `images` it takes, copied, the rows that lie within a run.
        """
        return cls._of(runs, images or {}, every=False)

    @classmethod
    def all_rows(cls, runs: Iterable[tuple[int, int, Sequence[int]]], images: Images | None = None) -> Batch:
        """The same, but it wants every row, as verification does."""
        return cls._of(runs, images or {}, every=True)

    @classmethod
    def _of(cls, runs: Iterable[tuple[int, int, Sequence[int]]], images: Images, *, every: bool) -> Batch:
        segments: list[Segment] = []
        tokens: list[int] = []
        rows: list[int] = []
        parts: list[tuple[int, torch.Tensor]] = []
        for slot, start, ids in runs:
            if not len(ids):
                raise ValueError(f"slot {slot}: an empty segment")
            segments.append(Segment(slot, start, len(ids)))
            for at, values in images.get(slot, ()):
                first, end = max(at, start), min(at + len(values), start + len(ids))
                if first < end:
                    parts.append((len(tokens) + first - start, torch.tensor(values[first - at : end - at])))
            tokens.extend(ids)
            rows.append(len(tokens) - 1)
        if not segments:
            raise ValueError("a batch needs at least one segment")
        if len({segment.slot for segment in segments}) != len(segments):
            raise ValueError("a slot may appear in one segment of a batch only")
        wanted = tuple(range(len(tokens))) if every else tuple(rows)
        return cls(torch.tensor(tokens, dtype=torch.int64), tuple(segments), wanted, tuple(parts))
