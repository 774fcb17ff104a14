"""Where each row of a batch stands: its position, its slot, and the cache rows it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.batch import Segment
from kernels.cache import StatePool
from kernels.engine import BLOCK_TOKENS
from kernels.kvpages import num_tile_blocks
from kernels.ops.attention import Window
from kernels.ops.linear import padded_rows

_SHORT = 16  # tokens of segments that are made up to one length
_MOST_FILLED = 24  # rows of a group that only fill it


class Rows(NamedTuple):
    """A copy: flat batch rows `source` to flat cache rows (slot times rows per slot plus row) `target`."""

    source: torch.Tensor
    target: torch.Tensor


class Emission(NamedTuple):
    """The compressed rows that a batch completes, for one ratio.

    `rows` are the batch rows that complete one, `positions` those of the first token of each group, `target` flat
    rows of the pages. Ratio 2 only: `partner` is the batch row of the pair's first token, except for the entries
    `carried`, whose first token waits in the flat pair row `carried_from`.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    target: torch.Tensor
    partner: torch.Tensor
    carried: torch.Tensor
    carried_from: torch.Tensor


class Before(NamedTuple):
    """The whole window before each segment, in position order: flat ring `rows` [num_segments, window] and `bias`
    [num_segments, window], -inf before the first token that has rows."""

    rows: torch.Tensor
    bias: torch.Tensor


class Group(NamedTuple):
    """Consecutive segments of one length: batch `rows` [num_segments * length].

    Short segments are made up to the length of the longest, where that takes few rows, by repeating their last one:
    passes over groups cost more than those rows. `real` are the places of the others, None when all are.
    `prefix` [num_segments * (window - 1)] flat ring rows before each segment, in position order; `window` says what the
    rows see of these and of one another; `tables` [num_segments, blocks] the blocks of each segment's request, whole
    key tiles up to `end_position`, the greatest position in the group plus one.
    """

    rows: slice | torch.Tensor
    real: torch.Tensor | None
    num_segments: int
    length: int
    prefix: torch.Tensor
    window: Window
    tables: torch.Tensor
    end_position: int


def check(segments: Sequence[Segment], pool: StatePool) -> None:
    """Raises ValueError when a segment does not continue its slot or does not fit."""
    for segment in segments:
        if segment.start != pool.length(segment.slot):
            held = pool.length(segment.slot)
            raise ValueError(f"slot {segment.slot} holds {held} tokens, the segment starts at {segment.start}")
        if segment.end > pool.room(segment.slot):
            raise ValueError(
                f"slot {segment.slot}: {segment.end} tokens exceed the {pool.room(segment.slot)} it was allocated for"
            )


class Layout:
    """Built once per forward pass and set of rows; all index arithmetic of the layers is here, computed on the host.

    `in_decoder`: for layers that bounded replay starts at the decoder's first token, not at the encoder's.
    """

    def __init__(self, segments: Sequence[Segment], pool: StatePool, *, in_decoder: bool = False) -> None:
        self._pool = pool
        self._device = pool.device
        states = [pool.starts(segment.slot) for segment in segments]
        self._window = pool.config.sliding_window
        self.num_rows = sum(segment.num_tokens for segment in segments)
        self.padded = padded_rows(self.num_rows)
        lengths = np.array([segment.num_tokens for segment in segments])
        starts = np.array([segment.start for segment in segments])
        slots = np.array([segment.slot for segment in segments])
        first = np.cumsum(lengths) - lengths
        rows = np.arange(self.num_rows)
        self._first = np.repeat(first, lengths)  # first batch row of the row's segment
        self._left = np.repeat(first + lengths, lengths) - rows  # rows from here to its end, this one included
        self._position = np.repeat(starts - first, lengths) + rows
        self._slot = np.repeat(slots, lengths)
        begin = np.array([state.decoder if in_decoder else state.encoder for state in states])
        self._begin = np.repeat(begin, lengths)  # the first position with window rows
        self._kept = np.repeat(np.array([state.kept for state in states]), lengths)
        self.slots = torch.from_numpy(self._slot)  # on the host, like `host_positions`
        padded = np.zeros(self.padded, dtype=np.int64)
        padded[: self.num_rows] = self._position
        self.host_positions = torch.from_numpy(padded)  # [padded], 0 for the rows that only fill the tile
        self.positions = self._put(padded)
        self.groups = tuple(self._groups(segments))
        self._emissions: dict[int, Emission] = {}
        self._heads = first

    @cached_property
    def ring(self) -> Rows:
        """What the sliding-window rings keep of this batch."""
        return self._rows(self._tail(self._pool.ring_rows))

    @cached_property
    def before(self) -> Before:
        """What the rows of a draft block see of their request."""
        positions = self._position[self._heads, None] + np.arange(-self._window, 0)
        rows = self._slot[self._heads, None] * self._pool.ring_rows + positions % self._pool.ring_rows
        bias = np.where(positions < self._begin[self._heads, None], np.float32("-inf"), np.float32(0))
        return Before(self._put(rows), self._put(bias))

    @cached_property
    def pair(self) -> Rows:
        """What the pair rings keep of this batch."""
        return self._rows(self._tail(self._pool.pair_rows))

    @cached_property
    def taps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What the rings of taps keep of this batch, as `Rows`, on the host."""
        assert self._pool.taps is not None
        return self._tail(self._pool.taps.ring_rows)

    def find(self, part: Layout) -> torch.Tensor:
        """The rows of this layout that are those of `part`, on the host: [part.padded], the first one for filling."""
        shift = np.zeros(self._pool.num_slots, dtype=np.int64)
        shift[self._slot] = np.arange(self.num_rows) - self._position
        rows = np.zeros(part.padded, dtype=np.int64)
        rows[: part.num_rows] = shift[part._slot] + part._position
        return torch.from_numpy(rows)

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def visible(self, ratio: int) -> torch.Tensor:
        """Compressed rows that each batch row may see: [num_rows]."""
        return (self.positions[: self.num_rows] + 1) // ratio

    def emission(self, ratio: int) -> Emission:
        """What the owners of this ratio emit."""
        if ratio not in self._emissions:
            self._emissions[ratio] = self._emission(ratio)
        return self._emissions[ratio]

    def _emission(self, ratio: int) -> Emission:
        completes = self._position % ratio == ratio - 1
        rows = np.flatnonzero(completes & (self._position // ratio >= self._kept // ratio))
        position = self._position[rows]
        carried = np.flatnonzero(rows == self._first[rows]) if ratio == 2 else np.empty(0, dtype=np.int64)
        slot = self._slot[rows]
        pair_rows = self._pool.pair_rows
        carried_from = slot[carried] * pair_rows + (position[carried] - 1) % pair_rows
        blocks = self._pool.kv.tables[slot, position // BLOCK_TOKENS]
        target = (blocks * BLOCK_TOKENS + position % BLOCK_TOKENS) // ratio
        arrays = (rows, position // ratio * ratio, target, np.maximum(rows - 1, 0), carried, carried_from)
        return Emission(*(self._put(array) for array in arrays))

    def _tail(self, ring_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        source = np.flatnonzero(self._left <= ring_rows)
        return source, self._slot[source] * ring_rows + self._position[source] % ring_rows

    def _rows(self, arrays: Sequence[npt.NDArray[np.int64]]) -> Rows:
        return Rows(*map(self._put, arrays))

    def _groups(self, segments: Sequence[Segment]) -> Iterator[Group]:
        row = 0
        for some in _alike(segments):
            yield self._group(some, row)
            row += sum(segment.num_tokens for segment in some)

    def _group(self, segments: Sequence[Segment], row: int) -> Group:
        lengths = np.array([segment.num_tokens for segment in segments])
        length, num_rows = int(lengths.max()), int(lengths.sum())
        rows: slice | torch.Tensor = slice(row, row + num_rows)
        index, real = np.arange(row, row + num_rows), None
        if num_rows < len(lengths) * length:
            place = np.arange(length)
            first = row + np.cumsum(lengths) - lengths
            index = (first[:, None] + np.minimum(place, lengths[:, None] - 1)).reshape(-1)
            rows, real = self._put(index), self._put(np.flatnonzero((place < lengths[:, None]).reshape(-1)))
        reach = np.arange(1 - self._window, 0)
        slots = np.array([segment.slot for segment in segments])
        starts = np.array([segment.start for segment in segments])
        ring_rows = self._pool.ring_rows
        prefix = slots[:, None] * ring_rows + (starts[:, None] + reach) % ring_rows
        hidden = np.maximum(self._begin[index] - (self._position[index] + 1 - self._window), 0)
        end_position = max(segment.end for segment in segments)
        return Group(
            rows,
            real,
            len(segments),
            length,
            self._put(prefix.reshape(-1)),
            Window(len(segments), self._window, self._put(hidden)),
            self._put(self._pool.kv.tables[slots, : num_tile_blocks(end_position)]),
            end_position,
        )


def _alike(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments that follow one another, of one length, or short ones that can be made so with few rows."""
    some: list[Segment] = []
    longest = num_rows = 0
    for segment in segments:
        num = segment.num_tokens
        most = max(longest, num)
        num_filled = (len(some) + 1) * most - num_rows - num
        if some and num_filled and (num_filled > _MOST_FILLED or most > _SHORT):
            yield some
            some, most, num_rows = [], num, 0
        some.append(segment)
        longest, num_rows = most, num_rows + num
    if some:
        yield some
