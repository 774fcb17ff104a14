"""What the draft stages read of a request's last tokens, kept until somebody wants their windows (spec §8.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.mix import mean_streams_

Observe = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Taps [rows, targets * dim] at positions [rows] int64 -> what the windows keep of them, [stages, rows, ..]."""

_MOST_WAITING = 128  # rows of small passes, until they go into the rings


class Taps:
    """Rings beside the `windows` [stages, slots, ring rows, ..]: a row costs its copy here, and what the stages make of
    it only once a draft or an export reads it. A busy engine drafts seldom, and most rows have left the window by then.

    Of each slot the windows hold the tokens before some position; those behind it wait here. Rows of small
    passes go into the rings some passes at once.
    """

    def __init__(self, windows: torch.Tensor, width: int, window: int, max_rollback: int) -> None:
        """A window is read at up to `max_rollback` tokens less than were computed, here and in `windows`."""
        _, num_slots, self._window_rows, _ = windows.shape
        self._windows, self.ring_rows = windows.flatten(1, 2), window + max_rollback
        self._rows = torch.zeros(num_slots * self.ring_rows, width, device=windows.device)
        self._waits_from = [0] * num_slots
        self._observe: Observe | None = None
        self._new = torch.empty(0, width, device=windows.device)  # the first of them wait to go into the rings,
        self._places: list[npt.NDArray[np.int64]] = []  # to these
        self._num_new = 0

    def keep(
        self,
        streams: Sequence[torch.Tensor],
        rows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        observe: Observe,
    ) -> None:
        """The means of `streams` [padded rows, C, dim], one per target layer, for `observe` to read later; `rows` are
        `Layout.taps`."""
        source, target = rows
        begin, end = self._num_new, self._num_new + len(source)
        if end > len(self._new):
            self._flush()
            begin, end = 0, len(source)
            if end > len(self._new):
                self._new = self._new.new_empty(max(end, _MOST_WAITING), self._new.shape[1])
        first = int(source[0])
        if int(source[-1]) - first == end - begin - 1:
            streams = [each[first : first + end - begin] for each in streams]
        else:
            at = torch.from_numpy(source).to(self._new.device)
            streams = [each[at] for each in streams]
        mean_streams_(self._new[begin:end].view(end - begin, len(streams), -1), streams)
        self._places.append(target)
        self._num_new, self._observe = end, observe

    def _flush(self) -> None:
        if not self._places:
            return
        target, new = np.concatenate(self._places), self._new[: self._num_new]
        if len(self._places) > 1:  # a place may be written again: the last one counts
            target, last = np.unique(target[::-1], return_index=True)
            new = new[torch.from_numpy(self._num_new - 1 - last).to(new.device)]
        self._rows[torch.from_numpy(target).to(new.device)] = new
        self._places, self._num_new = [], 0

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
        if self._observe is None or not counts.any():
            return
        self._flush()
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
        self._windows[:, target] = self._observe(self._rows[source], positions)
        for number, length in zip(slots, lengths, strict=True):
            self._waits_from[number] = length
