"""Compressed KV and index keys of all requests, as records in blocks of 128 tokens."""

from __future__ import annotations

import numpy as np
import torch

from kernels.config import ModelConfig
from kernels.engine import BLOCK_TOKENS, Admission
from kernels.kvlayout import KVLayout
from kernels.ops.index import KEY_TILE
from kernels.pages import PagePool, num_blocks_of

_RATIO = 2  # the largest one


class KVPages:
    """`num_blocks` blocks, and for each slot which of them hold its tokens, in order.

    Per KV owner `main` uint8 [blocks, rows per block, main bytes] and `index_k` likewise; block 0 belongs to nobody and
    stays zero. `tables` int64 [num_slots, blocks of one slot], whole key tiles wide, 0 behind a slot's own blocks.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_tokens: int, num_blocks: int, device: torch.device
    ) -> None:
        self.config, self.layout = config, KVLayout(config)
        self.main: dict[int, torch.Tensor] = {}
        self.index_k: dict[int, torch.Tensor] = {}
        for role in config.kv_owners:
            for arrays, row_bytes in ((self.main, self.layout.main_bytes), (self.index_k, self.layout.index_bytes)):
                shape = (num_blocks + 1, self.layout.rows(role), row_bytes)
                arrays[role.layer] = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.tables = np.zeros((num_slots, num_tile_blocks(max_tokens)), dtype=np.int64)
        self._pages = PagePool(num_blocks)
        self._num_reserved = [0] * num_slots

    @property
    def num_free(self) -> int:
        """Blocks that no slot has."""
        return self._pages.num_free

    def admit(self, num_tokens: int) -> Admission:
        return self._pages.admit(num_blocks_of(num_tokens))

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Give a slot that has none the blocks of `num_tokens`. Raises PoolFull."""
        blocks = self._pages.take(num_blocks_of(num_tokens))
        self.tables[slot, : len(blocks)] = blocks
        self._num_reserved[slot] = len(blocks)
        for pages in self.main.values():  # what a row without picks reads, and hides
            pages[int(self.tables[slot, 0]), 0] = 0

    def grow(self, slot: int, num: int) -> None:
        """Give a slot so many blocks more, behind those that it has. Raises PoolFull."""
        first = self._num_reserved[slot]
        self.tables[slot, first : first + num] = self._pages.take(num)
        self._num_reserved[slot] = first + num

    def free(self, slot: int) -> None:
        """Give a slot's blocks back."""
        self._pages.give_back(self.tables[slot, : self._num_reserved[slot]].tolist())
        self.tables[slot] = 0
        self._num_reserved[slot] = 0

    def payloads(self, slot: int, first: int, num: int) -> torch.Tensor:
        """Copies of `num` blocks of a slot, in order: uint8 [num, block_bytes] on the CPU, as `KVLayout` says."""
        ids = torch.from_numpy(self.tables[slot, first : first + num])
        return self.layout.join({name: pages[ids.to(pages.device)] for name, pages in self._arrays()}).cpu()

    def records(self, slot: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Copies on the host of a slot's records of the first `num_tokens`: per KV owner `main.{layer}` and
        `index_k.{layer}` uint8 [num_tokens // ratio, row bytes]."""
        return {
            name: pages.flatten(0, 1)[self._rows(slot, num_tokens, pages).to(pages.device)].cpu()
            for name, pages in self._arrays()
        }

    def shapes(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """The shapes of what `records` gives."""
        return {
            name: (num_tokens * pages.shape[1] // BLOCK_TOKENS, pages.shape[2]) for name, pages in self._arrays()
        }

    def write(self, slot: int, num_tokens: int, records: dict[str, torch.Tensor]) -> None:
        """Put what `records` gave, of `num_tokens`, into a slot's blocks."""
        for name, pages in self._arrays():
            rows = self._rows(slot, num_tokens, pages).to(pages.device)
            pages.flatten(0, 1)[rows] = records[name].to(pages.device)

    def _arrays(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{name}.{role.layer}", arrays[role.layer])
            for role in self.config.kv_owners
            for name, arrays in (("main", self.main), ("index_k", self.index_k))
        ]

    def _rows(self, slot: int, num_tokens: int, pages: torch.Tensor) -> torch.Tensor:
        """Flat rows of `pages` that hold a slot's first `num_tokens`."""
        per_block = pages.shape[1]
        rows = np.arange(num_tokens * per_block // BLOCK_TOKENS)
        return torch.from_numpy(self.tables[slot, rows // per_block] * per_block + rows % per_block)


def num_tile_blocks(num_tokens: int) -> int:
    """The same, as many more as it takes to fill whole key tiles at any ratio."""
    tile_tokens = KEY_TILE * _RATIO
    return -(-num_tokens // tile_tokens) * tile_tokens // BLOCK_TOKENS


def checked(
    tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor `name` of an imported state. Raises ValueError when it is missing, misshapen or of another type."""
    if name not in tensors:
        raise ValueError(f"imported state lacks {name}")
    got = tensors[name]
    if tuple(got.shape) != tuple(shape) or got.dtype != dtype:
        raise ValueError(f"imported {name} is {got.dtype} {list(got.shape)}, expected {dtype} {list(shape)}")
    return got
