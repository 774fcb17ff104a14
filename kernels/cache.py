"""The state of running requests: preallocated arrays with one slot per request, and nothing hidden elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch

from kernels import replay
from kernels.config import ModelConfig
from kernels.engine import BLOCK_TOKENS, Admission
from kernels.kvpages import KVPages, checked
from kernels.ops.pack import Record, gather, pack, window_rows, window_values
from kernels.pages import PoolFull, num_blocks_of
from kernels.replay import Starts
from kernels.taps import Taps

_CPU = torch.device("cpu")


class StatePool:
    """State of at most `num_slots` requests of at most `max_tokens` tokens each.

    Compressed rows and index keys lie in blocks shared by all slots (`kv`); a slot has those of the tokens that it was
    allocated for. Per slot there are a sliding-window ring a layer (of what `window_rows` gives), for each KV owner of
    ratio 2 the FP32 (kv, score) of the last tokens, and the token ids. The last `max_rollback` tokens can be taken
    back, and windows at the ends of the last two whole blocks be read: rings hold that many rows more than the
    arithmetic needs.
    With `drafts`, a window ring per draft stage too, written from `taps` when it is read. `num_blocks`: of 128 tokens;
    without it every slot can be full.
    All lie on `device`, but the token ids, which only the host reads; exported state is on the host.
    Rows outside a request's valid length may hold anything, but no NaN of another request: attention adds up what is
    hidden, too. So `alloc` clears what hidden rows are read from.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_tokens: int,
        max_rollback: int = 8,
        *,
        drafts: bool = False,
        num_blocks: int | None = None,
        device: torch.device = _CPU,
    ) -> None:
        if num_slots < 1 or max_tokens < 1 or max_rollback < 0:
            raise ValueError("num_slots and max_tokens must be positive, max_rollback not negative")
        self.config, self.device = config, device
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.max_rollback = max_rollback
        self.ring_rows = config.sliding_window + max_rollback + 2 * BLOCK_TOKENS
        self.pair_rows = max_rollback + 2
        dim = config.head_dim
        if num_blocks is None:
            num_blocks = num_slots * num_blocks_of(max_tokens)
        self.kv = KVPages(config, num_slots, max_tokens, num_blocks, device)
        nothing = window_rows(torch.zeros(1, dim, device=device))
        num_stages = config.num_nextn_predict_layers if drafts else 0
        self.swa, self.draft_swa = (
            nothing.new_zeros(num, num_slots, self.ring_rows, nothing.shape[1])
            for num in (config.num_hidden_layers, num_stages)
        )
        width = len(config.dspark_target_layer_ids) * config.hidden_size
        self.taps = Taps(self.draft_swa, width, config.sliding_window, max_rollback) if num_stages else None
        # [num_slots, pair_rows, 2 (kv, score), head_dim] fp32
        self.pair = {
            role.layer: torch.zeros(num_slots, self.pair_rows, 2, dim, device=device)
            for role in config.kv_owners
            if role.ratio == 2
        }
        self.tokens = torch.zeros(num_slots, max_tokens, dtype=torch.int64)
        self._length = [0] * num_slots
        self._room = [0] * num_slots  # tokens that the slot was allocated for
        self._starts = [Starts()] * num_slots
        self._floor = [0] * num_slots  # the shortest length that truncate can still restore
        self._first = [0] * num_slots  # the first position whose window rows were computed or imported here
        self._longest = [0] * num_slots  # the greatest length so far: rings hold the rows before it
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, num_tokens: int) -> Admission:
        """Whether `alloc` would give a slot with room for `num_tokens`: now, later, or never, not even alone."""
        if num_tokens > self.max_tokens:
            return Admission.NEVER
        blocks = self.kv.admit(num_tokens)
        return blocks if self._free or blocks is Admission.NEVER else Admission.LATER

    def alloc(self, num_tokens: int | None = None) -> int:
        """Take a free slot, empty, with room for `num_tokens` (by default `max_tokens`). Raises PoolFull."""
        room = self.max_tokens if num_tokens is None else num_tokens
        if self.admit(room) is not Admission.OK:
            free = f"{len(self._free)} of {self.num_slots} slots and {self.kv.num_free} blocks are free"
            raise PoolFull(f"{free}: no room for {room} tokens")
        slot = self._free.pop()
        self.kv.reserve(slot, room)
        self.swa[:, slot] = 0
        self.draft_swa[:, slot] = 0
        self._used.add(slot)
        self._room[slot] = room
        self._starts[slot] = Starts()
        self._begin(slot, 0, 0)
        return slot

    def grow(self, slot: int, num_tokens: int) -> None:
        """Make room in a slot for `num_tokens` in all, if that is more than it has. Raises ValueError for more than
        `max_tokens`, PoolFull; then nothing changed."""
        self._need(slot)
        if num_tokens > self.max_tokens:
            raise ValueError(f"slot {slot} cannot hold {num_tokens} tokens, only {self.max_tokens}")
        if num_tokens > self._room[slot]:
            self.kv.grow(slot, num_blocks_of(num_tokens) - num_blocks_of(self._room[slot]))
            self._room[slot] = num_tokens

    def free(self, slot: int) -> None:
        """Give a slot back. Raises ValueError when it is not in use."""
        self._need(slot)
        self._used.remove(slot)
        self._free.append(slot)
        self.kv.free(slot)

    def room(self, slot: int) -> int:
        """Number of tokens that the slot was allocated for."""
        self._need(slot)
        return self._room[slot]

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
        self._length[slot], self._longest[slot] = length, max(self._longest[slot], length)
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
        if self.taps is not None:
            self.taps.truncate(slot, length)

    def settle(self, slots: Sequence[int]) -> None:
        """Bring `draft_swa` up to the lengths of `slots`."""
        if self.taps is not None:
            firsts = [self._starts[slot].decoder for slot in slots]
            self.taps.settle(slots, firsts, [self.length(slot) for slot in slots])

    def export(self, slot: int) -> dict[str, torch.Tensor]:
        """Copies of the valid rows of a request: what prefill hands to decode.

        `length` [] int64; `starts` [4] int64, the fields of `Starts`; `tokens` [length] int64; `swa` uint8 [layers,
        min(length, window - 1), row bytes], in position order; per KV owner `main.{layer}` and `index_k.{layer}` uint8
        [length // ratio, row bytes]; per ratio-2 owner `pair.{layer}` [length % 2, 2, head_dim] fp32; with drafts
        `draft_swa` uint8 [stages, min(length, window), row bytes]. Bytes are records (`ops/pack.py`), bit for bit what
        the caches hold. Raises ValueError within a prompt that is being replayed.
        """
        self._need(slot)
        length, starts = self._length[slot], self._starts[slot]
        if length < starts.whole:
            raise ValueError(f"slot {slot}: {length} of {starts.whole} replayed tokens are computed")
        tensors = {
            "length": torch.tensor(length),
            "starts": torch.tensor(astuple(starts)),
            "tokens": self.tokens[slot, :length].clone(),
            **self.kv.records(slot, length),
        }
        self.settle([slot])
        tensors |= {name: self._read_ring(ring, slot, rows) for name, ring, rows in self._rings(length)}
        for layer, pair in self.pair.items():
            tensors[f"pair.{layer}"] = pair[slot, self._pair_index(length)].cpu()
        return tensors

    def import_(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Put an exported request into an allocated slot that holds no tokens.

        Raises ValueError when the slot is not in use or not empty, the request does not fit, or a tensor is missing or
        misshapen.
        """
        self._need(slot)
        if "length" not in tensors:
            raise ValueError("imported state lacks length")
        length = int(tensors["length"])
        # Every tensor is checked before any is written, so that a bad one leaves the slot as it was.
        self._check_prefix(slot, length, tensors)
        starts = Starts(*checked(tensors, "starts", (4,), torch.int64).tolist())
        if length < starts.whole:
            raise ValueError(f"imported state of {length} tokens lacks rows of {starts.whole} replayed ones")
        row_bytes = self.kv.layout.window_bytes
        for name, ring, rows in self._rings(length):
            checked(tensors, name, (len(ring), len(rows), row_bytes), torch.uint8)
        pair_rows = self._pair_index(length)
        for layer, pair in self.pair.items():
            checked(tensors, f"pair.{layer}", (len(pair_rows), *pair.shape[2:]), pair.dtype)
        self._write_prefix(slot, length, tensors)
        for name, ring, rows in self._rings(length):
            self._write_ring(ring, slot, rows, tensors[name])
        for layer, pair in self.pair.items():
            pair[slot, pair_rows] = tensors[f"pair.{layer}"].to(self.device)
        self._starts[slot] = starts
        self._begin(slot, length, max(0, length - self.config.sliding_window + 1))

    def import_prefix(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Put the cached compressed rows of a prefix into an empty slot.

        `tokens`, `main.{layer}` and `index_k.{layer}` as `export` gives them for the prefix; `KVLayout.split` makes the
        latter of cached blocks. With `swa`, as `windows` gives it, the slot then holds all that layers before the
        decoder need, as if they had computed the prefix; the decoder must begin behind it (`plan_replay`). Without it
        the length is one window short of the prefix (encoder replay): the caller computes those tokens again, and with
        them the window rows; compressed rows of the prefix stay. Raises ValueError as `import_` does.
        """
        self._need(slot)
        if "tokens" not in tensors:
            raise ValueError("imported state lacks tokens")
        length, window = tensors["tokens"].numel(), self.config.sliding_window
        self._check_prefix(slot, length, tensors)
        if "swa" not in tensors:
            self._write_prefix(slot, length, tensors)
            self._starts[slot] = replay.after_prefix(length, window)
            self._begin(slot, self._starts[slot].encoder, self._starts[slot].encoder)
            return
        ring, rows = self.swa[: self.config.first_decoder_layer], self._ring_index(length, window - 1)
        checked(tensors, "swa", (len(ring), len(rows), self.kv.layout.window_bytes), torch.uint8)
        self._write_prefix(slot, length, tensors)
        self._write_ring(ring, slot, rows, tensors["swa"])
        self._begin(slot, length, max(0, length - window + 1))

    def windows(self, slot: int, length: int) -> torch.Tensor | None:
        """Window rows of the layers before the decoder, as they were at `length` tokens: uint8 [layers, min(length,
        window - 1), row bytes], records on the host; None when not all of them are there (any more)."""
        self._need(slot)
        first = max(0, length - self.config.sliding_window + 1)
        if length > self._length[slot] or first < self._first[slot] or first + self.ring_rows < self._longest[slot]:
            return None
        rows = self._ring_index(length, self.config.sliding_window - 1)
        return self._read_ring(self.swa[: self.config.first_decoder_layer], slot, rows)

    def _begin(self, slot: int, length: int, first: int) -> None:
        """The slot goes on at `length`, and has window rows from `first` on."""
        self._length[slot] = self._floor[slot] = self._longest[slot] = length
        self._first[slot] = first
        if self.taps is not None:
            self.taps.begin(slot, length)

    def _check_prefix(self, slot: int, length: int, tensors: dict[str, torch.Tensor]) -> None:
        if self._length[slot]:
            raise ValueError(f"slot {slot} holds {self._length[slot]} tokens, only an empty one imports")
        if not 0 <= length <= self._room[slot]:
            raise ValueError(f"imported state of {length} tokens does not fit in {self._room[slot]}")
        checked(tensors, "tokens", (length,), self.tokens.dtype)
        for name, shape in self.kv.shapes(length).items():
            checked(tensors, name, shape, torch.uint8)

    def _write_prefix(self, slot: int, length: int, tensors: dict[str, torch.Tensor]) -> None:
        self.tokens[slot, :length] = tensors["tokens"]
        self.kv.write(slot, length, tensors)

    def _read_ring(self, ring: torch.Tensor, slot: int, rows: torch.Tensor) -> torch.Tensor:
        """Records of some `rows` of all layers of `ring`: uint8 [layers, rows, row bytes], on the host."""
        records = pack(window_values(ring[:, slot, rows].flatten(0, 1)), Record.WINDOW)
        return records.view(len(ring), len(rows), self.kv.layout.window_bytes).cpu()

    def _write_ring(self, ring: torch.Tensor, slot: int, rows: torch.Tensor, records: torch.Tensor) -> None:
        flat = records.flatten(0, 1).to(self.device)
        values = gather(flat, torch.arange(len(flat), device=self.device), Record.WINDOW)
        ring[:, slot, rows] = window_rows(values).view(len(ring), len(rows), ring.shape[-1])

    def _rings(self, length: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, ring and valid rows of it, in position order, at `length` tokens."""
        window = self.config.sliding_window
        rings = [("swa", self.swa, self._ring_index(length, window - 1))]
        if len(self.draft_swa):
            rings.append(("draft_swa", self.draft_swa, self._ring_index(length, window)))
        return rings

    def _ring_index(self, length: int, reach: int) -> torch.Tensor:
        """Ring rows of the last `reach` of `length` tokens, in position order."""
        positions = torch.arange(max(0, length - reach), length, device=self.device)
        return positions % self.ring_rows

    def _pair_index(self, length: int) -> torch.Tensor:
        """Pair-ring row of the token that waits for its partner: one row when `length` is odd, else none."""
        return torch.arange(length - length % 2, length, device=self.device) % self.pair_rows

    def _need(self, slot: int) -> None:
        if slot not in self._used:
            raise ValueError(f"slot {slot} is not in use")
