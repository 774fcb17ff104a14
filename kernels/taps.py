"""What the draft stages read of a request's last tokens, kept until somebody wants their windows (spec §8.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_MOST_HELD = 128  # rows of passes that wait to be copied together


class Reader(Protocol):
    """Whoever reads the taps."""

    def read(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Residual streams [rows, C, dim], one per target layer -> taps [rows, targets * dim]."""

    def observe(self, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Taps [rows, targets * dim] at positions [rows] int64 -> what the windows keep of them, [stages, rows, ..]."""


class Taps:
    """Rings beside the `windows` [stages, slots, ring rows, ..]: a row costs its copy here, and what the stages make of
    it only once a draft or an export reads it. A busy engine drafts seldom, and most rows have left the window by then.

    Of each slot the windows hold the tokens before some position; those behind it wait here. Small passes are copied
    some at once.
    """

    def __init__(self, windows: torch.Tensor, width: int, window: int, max_rollback: int) -> None:
        """A window is read at up to `max_rollback` tokens less than were computed, here and in `windows`."""
        _, num_slots, self._window_rows, _ = windows.shape
        self._windows, self.ring_rows = windows.flatten(1, 2), window + max_rollback
        self._rows = torch.zeros(num_slots * self.ring_rows, width, device=windows.device)
        self._waits_from = [0] * num_slots
        self._reader: Reader | None = None
        self._held: list[tuple[Sequence[torch.Tensor], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._num_held = 0  # rows of them

    def keep(
        self, streams: Sequence[torch.Tensor], rows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], reader: Reader
    ) -> None:
        """`streams` [padded rows, C, dim], one per target layer, for `reader` to read later: nothing may write to them
        any more. `rows` are `Layout.taps`."""
        self._held.append((streams, *rows))
        self._num_held += len(streams[0])
        self._reader = reader
        if self._num_held >= _MOST_HELD:
            self._copy()

    def _copy(self) -> None:
        """What is held into the rings."""
        if self._reader is None or not self._held:
            return
        firsts = np.cumsum([0] + [len(streams[0]) for streams, _, _ in self._held])
        source = np.concatenate([rows + first for (_, rows, _), first in zip(self._held, firsts, strict=False)])
        target = np.concatenate([target for _, _, target in self._held])
        if len(self._held) > 1:  # a place may be written again: the last one counts
            target, places = np.unique(target[::-1], return_index=True)
            source = source[::-1][places]
        of_layers = zip(*(streams for streams, _, _ in self._held), strict=True)
        device = self._rows.device
        at, to = (torch.from_numpy(array).to(device) for array in (source, target))
        self._rows[to] = self._reader.read([torch.cat(streams)[at] for streams in of_layers])
        self._held, self._num_held = [], 0

    def begin(self, slot: int, length: int) -> None:
        """Nothing waits of the first `length` tokens."""
        self._waits_from[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """The tokens from `length` on are taken back."""
        self._waits_from[slot] = min(self._waits_from[slot], length)

    @torch.inference_mode()
    def settle(self, slots: Sequence[int], firsts: Sequence[int], lengths: Sequence[int]) -> None:
        """Make the windows of `slots` hold all that is read of their `lengths`; before `firsts` no row was kept."""
        waiting = [self._waits_from[slot] for slot in slots]
        ends = np.array(lengths)
        begins = np.maximum(np.maximum(waiting, firsts), ends - self.ring_rows)
        counts = np.maximum(ends - begins, 0)
        if self._reader is None or not counts.any():
            return
        self._copy()
        slot = np.repeat(slots, counts)
        position = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        source, target, positions = (
            torch.from_numpy(array).to(self._rows.device)
            for array in (
                slot * self.ring_rows + position % self.ring_rows,
                slot * self._window_rows + position % self._window_rows,
                position,
            )
        )
        self._windows[:, target] = self._reader.observe(self._rows[source], positions)
        for number, length in zip(slots, lengths, strict=True):
            self._waits_from[number] = length
