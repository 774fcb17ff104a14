"""The state of running requests: preallocated arrays with one slot per request, and nothing hidden elsewhere."""

from __future__ import annotations

import torch

from kernels import replay
from kernels.config import ModelConfig
from kernels.ops.index import KEY_TILE
from kernels.replay import Starts


class PoolFull(RuntimeError):
    """No slot is free."""


class StatePool:
    """State of at most `num_slots` requests of at most `max_tokens` tokens each.

    Per layer a sliding-window ring, per KV owner the main KV and index-key caches (bf16, exact: quantise-dequantise
    results are representable) and for ratio 2 the FP32 (kv, score) of the last tokens, per slot its token ids.
    The last `max_rollback` tokens can be taken back: rings hold that many rows more than the arithmetic needs.
    With `drafts`, a window ring per draft stage too.
    Rows outside a request's valid length may hold anything finite; freeing costs nothing.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_tokens: int, max_rollback: int = 8, *, drafts: bool = False
    ) -> None:
        if num_slots < 1 or max_tokens < 1 or max_rollback < 0:
            raise ValueError("num_slots and max_tokens must be positive, max_rollback not negative")
        self.config = config
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.max_rollback = max_rollback
        self.ring_rows = config.sliding_window + max_rollback
        self.pair_rows = max_rollback + 2
        dim = config.head_dim

        def rows(ratio: int) -> int:  # whole key tiles, so that scoring never needs a partial one
            return max(-(-(max_tokens // ratio) // KEY_TILE), 1) * KEY_TILE

        bf16 = torch.bfloat16
        self.swa = torch.zeros(config.num_hidden_layers, num_slots, self.ring_rows, dim, dtype=bf16)
        num_stages = config.num_nextn_predict_layers if drafts else 0
        self.draft_swa = torch.zeros(num_stages, num_slots, self.ring_rows, dim, dtype=bf16)
        self.main: dict[int, torch.Tensor] = {}  # [num_slots, rows, head_dim]
        self.index_k: dict[int, torch.Tensor] = {}  # [num_slots, rows, index_head_dim]
        self.pair: dict[int, torch.Tensor] = {}  # [num_slots, pair_rows, 2 (kv, score), head_dim] fp32
        for role in config.kv_owners:
            num_rows = rows(role.ratio)
            self.main[role.layer] = torch.zeros(num_slots, num_rows, dim, dtype=bf16)
            self.index_k[role.layer] = torch.zeros(num_slots, num_rows, config.index_head_dim, dtype=bf16)
            if role.ratio == 2:
                self.pair[role.layer] = torch.zeros(num_slots, self.pair_rows, 2, dim)
        self.tokens = torch.zeros(num_slots, max_tokens, dtype=torch.int64)
        self._length = [0] * num_slots
        self._starts = [Starts()] * num_slots
        self._floor = [0] * num_slots  # the shortest length that truncate can still restore
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        caches = [*self.main.values(), *self.index_k.values(), *self.pair.values()]
        return sum(array.nbytes for array in [self.swa, self.draft_swa, self.tokens, *caches])

    def alloc(self) -> int:
        """Take a free slot, empty. Raises PoolFull."""
        if not self._free:
            raise PoolFull(f"all {self.num_slots} slots are in use")
        slot = self._free.pop()
        self._used.add(slot)
        self._length[slot] = self._floor[slot] = 0
        self._starts[slot] = Starts()
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises ValueError when it is not in use."""
        self._need(slot)
        self._used.remove(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Number of tokens whose state the slot holds; also the position of the next token."""
        self._need(slot)
        return self._length[slot]

    def starts(self, slot: int) -> Starts:
        """What bounded replay left out of the slot's state."""
        self._need(slot)
        return self._starts[slot]

    def plan_replay(self, slot: int, num_tokens: int) -> None:
        """Decoder replay: the slot's prompt ends at `num_tokens`, and decoder layers compute its last window only.

        Said once, before that window is reached; then the prompt may be cut in any way, and generation follows.
        Raises ValueError when the slot holds tokens of that window already.
        """
        self._need(slot)
        starts = replay.for_prompt(self._starts[slot], num_tokens, self.config.sliding_window)
        if self._length[slot] > starts.decoder:
            raise ValueError(
                f"slot {slot} holds {self._length[slot]} tokens, decoder replay begins at {starts.decoder}"
            )
        self._starts[slot] = starts

    def advance(self, slot: int, num_tokens: int) -> None:
        """Count tokens whose state a forward pass has just written (called by `Model.forward`)."""
        length = self._length[slot] + num_tokens
        self._length[slot] = length
        # A replayed prompt cannot be cut short: another length would have been replayed from elsewhere.
        self._floor[slot] = max(self._floor[slot], length - self.max_rollback, min(length, self._starts[slot].whole))

    def truncate(self, slot: int, length: int) -> None:
        """Take back the tokens from position `length` on, as if they had never been computed.

        Raises ValueError when `length` is beyond the present one, more than `max_rollback` tokens back,
        within a replayed prompt, or before the point at which the state was imported.
        """
        self._need(slot)
        if not self._floor[slot] <= length <= self._length[slot]:
            raise ValueError(
                f"slot {slot} holds {self._length[slot]} tokens and can go back to {self._floor[slot]}, not to {length}"
            )
        self._length[slot] = length

    def export(self, slot: int) -> dict[str, torch.Tensor]:
        """Copies of the valid rows of a request: what prefill hands to decode.

        `length` [] int64; `tokens` [length] int64; `swa` [layers, min(length, window - 1), head_dim] bf16, in position
        order; per KV owner `main.{layer}` and `index_k.{layer}` [length // ratio, dim] bf16; per ratio-2 owner
        `pair.{layer}` [length % 2, 2, head_dim] fp32; with drafts `draft_swa` [stages, min(length, window), head_dim]
        bf16. Raises ValueError within a prompt that is being replayed.
        """
        self._need(slot)
        length, whole = self._length[slot], self._starts[slot].whole
        if length < whole:
            raise ValueError(f"slot {slot}: {length} of {whole} replayed tokens are computed")
        window = self.config.sliding_window
        rows = self._ring_index(length, window - 1)
        tensors = {
            "length": torch.tensor(length),
            "tokens": self.tokens[slot, :length].clone(),
            "swa": self.swa[:, slot, rows],
        }
        if len(self.draft_swa):
            tensors["draft_swa"] = self.draft_swa[:, slot, self._ring_index(length, window)]
        for role in self.config.kv_owners:
            num_rows = length // role.ratio
            tensors[f"main.{role.layer}"] = self.main[role.layer][slot, :num_rows].clone()
            tensors[f"index_k.{role.layer}"] = self.index_k[role.layer][slot, :num_rows].clone()
            if role.ratio == 2:
                tensors[f"pair.{role.layer}"] = self.pair[role.layer][slot, self._pair_index(length)]
        return tensors

    def import_(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Put an exported request into an allocated slot, whose former contents are lost.

        Raises ValueError when the slot is not in use, the request does not fit, or a tensor is missing or misshapen.
        """
        self._need(slot)
        if "length" not in tensors:
            raise ValueError("imported state lacks length")
        length = int(tensors["length"])
        if not 0 <= length <= self.max_tokens:
            raise ValueError(f"imported state of {length} tokens does not fit in {self.max_tokens}")
        # Every tensor is checked before any is written, so that a bad one leaves the slot as it was.
        targets = self._prefix_targets(slot, length, tensors)
        window, dim = self.config.sliding_window, self.config.head_dim
        rows, draft_rows = self._ring_index(length, window - 1), self._ring_index(length, window)
        _check(tensors, "swa", (self.config.num_hidden_layers, len(rows), dim), self.swa.dtype)
        if len(self.draft_swa):
            _check(tensors, "draft_swa", (len(self.draft_swa), len(draft_rows), dim), self.draft_swa.dtype)
        pair_rows = self._pair_index(length)
        for layer, pair in self.pair.items():
            _check(tensors, f"pair.{layer}", (len(pair_rows), 2, dim), pair.dtype)
        for target, name in targets:
            target.copy_(tensors[name])
        self.swa[:, slot, rows] = tensors["swa"]
        if len(self.draft_swa):
            self.draft_swa[:, slot, draft_rows] = tensors["draft_swa"]
        for layer, pair in self.pair.items():
            pair[slot, pair_rows] = tensors[f"pair.{layer}"]
        self._length[slot] = self._floor[slot] = length
        self._starts[slot] = Starts()

    def import_prefix(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Put the cached compressed rows of a prefix into an allocated slot, without window rows (encoder replay).

        `tokens`, `main.{layer}` and `index_k.{layer}` as `export` gives them for the prefix. The slot's length is
        then one window short of it: the caller computes those tokens again, and with them the window rows; compressed
        rows of the prefix stay. Raises ValueError as `import_` does.
        """
        self._need(slot)
        if "tokens" not in tensors:
            raise ValueError("imported state lacks tokens")
        length = tensors["tokens"].numel()
        if length > self.max_tokens:
            raise ValueError(f"imported state of {length} tokens does not fit in {self.max_tokens}")
        for target, name in self._prefix_targets(slot, length, tensors):
            target.copy_(tensors[name])
        self._starts[slot] = replay.after_prefix(length, self.config.sliding_window)
        self._length[slot] = self._floor[slot] = self._starts[slot].encoder

    def _prefix_targets(
        self, slot: int, length: int, tensors: dict[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, str]]:
        """Where the tokens and compressed rows of `tensors` go, each checked."""
        targets: list[tuple[torch.Tensor, str]] = [(self.tokens[slot, :length], "tokens")]
        for role in self.config.kv_owners:
            num_rows = length // role.ratio
            targets.append((self.main[role.layer][slot, :num_rows], f"main.{role.layer}"))
            targets.append((self.index_k[role.layer][slot, :num_rows], f"index_k.{role.layer}"))
        for target, name in targets:
            _check(tensors, name, target.shape, target.dtype)
        return targets

    def _ring_index(self, length: int, reach: int) -> torch.Tensor:
        """Ring rows of the last `reach` of `length` tokens, in position order."""
        positions = torch.arange(max(0, length - reach), length)
        return positions % self.ring_rows

    def _pair_index(self, length: int) -> torch.Tensor:
        """Pair-ring row of the token that waits for its partner: one row when `length` is odd, else none."""
        return torch.arange(length - length % 2, length) % self.pair_rows

    def _need(self, slot: int) -> None:
        if slot not in self._used:
            raise ValueError(f"slot {slot} is not in use")


def _check(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if name not in tensors:
        raise ValueError(f"imported state lacks {name}")
    got = tensors[name]
    if tuple(got.shape) != tuple(shape) or got.dtype != dtype:
        raise ValueError(f"imported {name} is {got.dtype} {list(got.shape)}, expected {dtype} {list(shape)}")
