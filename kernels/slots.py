"""What a computed request is outside of its engine: its state, its blocks and its windows as bytes, and back."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from kernels.cache import StatePool
from kernels.engine import Prefix, StateError
from kernels.requests import NONE, Request, check_restored
from kernels.schedule import History
from kernels.seal import seal, unseal

_NUM_TOKENS = struct.Struct("<Q")


@dataclass(slots=True)
class SlotRequest(Request):
    """`hidden` [hidden_size] is the last prompt row, kept until the first token is sampled from it.

    `images`: position and rows [num_tokens, hidden_size] of those that are not wholly computed.
    `history`: of its drafts.
    """

    slot: int = -1
    hidden: torch.Tensor | None = None
    images: list[tuple[int, npt.NDArray[np.float32]]] = field(default_factory=list)
    history: History = field(default_factory=History)

    def advance(self, num_tokens: int) -> None:
        """That many tokens are computed, from the start on."""
        self.num_tokens = num_tokens
        self.images = [one for one in self.images if one[0] + len(one[1]) > num_tokens]


def export_state(key: str, request: SlotRequest, pool: StatePool, layout: str) -> bytes:
    """Sealed for engines of `layout`. Raises ValueError for numbers that overflowed."""
    if request.hidden is not None and not bool(request.hidden.isfinite().all()):
        raise ValueError(f"request {key}: what was computed of its prompt are no numbers")
    tensors = {name: tensor.contiguous() for name, tensor in pool.export(request.slot).items()}
    if request.hidden is not None:
        tensors["hidden"] = request.hidden.cpu()
    else:
        tensors["last"] = torch.tensor(request.last)
    tensors["drafts"] = torch.tensor(request.history.dump(), dtype=torch.float64)
    return seal(layout, safetensors.torch.save(tensors))


def restore_state(request: SlotRequest, pool: StatePool, layout: str, state: bytes) -> None:
    """What `export_state` gave, into an empty slot. Raises StateError; the slot is then as it was."""
    try:
        tensors = safetensors.torch.load(bytes(unseal(layout, state)))
    except safetensors.SafetensorError as error:
        raise StateError(f"state is damaged: {error}") from None
    hidden, last = tensors.pop("hidden", None), tensors.pop("last", None)
    try:
        told = tensors.pop("drafts", torch.empty(0)).flatten().tolist()
        history = History.load(told, pool.config.dspark_block_size)
    except ValueError as error:
        raise StateError(f"state has {error}") from None
    if (hidden is None) == (last is None):
        raise StateError("state must hold either a pending hidden row or a pending token")
    if hidden is not None and (hidden.shape != (pool.config.hidden_size,) or hidden.dtype != torch.float32):
        raise StateError(f"state's hidden row is {hidden.dtype} {list(hidden.shape)}")
    if last is not None and not 0 <= int(last) < pool.config.vocab_size:
        raise StateError(f"state's pending token {int(last)} is not in the vocabulary")
    num_tokens = int(tensors["length"]) if "length" in tensors else 0
    check_restored(request, num_tokens)
    try:
        pool.import_(request.slot, tensors)
    except ValueError as error:
        raise StateError(str(error)) from None
    request.num_tokens, request.history = num_tokens, history
    request.hidden = None if hidden is None else hidden.to(pool.device)
    request.last = NONE if last is None else int(last)


def read_blocks(request: SlotRequest, pool: StatePool, first: int, num: int) -> list[bytes]:
    """The payloads of `num` complete blocks."""
    return [payload.tobytes() for payload in pool.kv.payloads(request.slot, first, num).numpy()]


def read_windows(request: SlotRequest, pool: StatePool, space: str, num_tokens: int) -> bytes | None:
    """Sealed for engines of `space`: the number of tokens, then the rows as `StatePool.windows` gives them."""
    rows = pool.windows(request.slot, num_tokens)
    return None if rows is None else seal(space, _NUM_TOKENS.pack(num_tokens) + rows.numpy().tobytes())


def resume(request: SlotRequest, pool: StatePool, space: str, prefix: Prefix) -> int:
    """Put a prefix into an empty slot; the position that prefill goes on from. Raises StateError, as it was then."""
    if int(prefix.tokens.max()) >= pool.config.vocab_size:
        raise StateError(f"token {int(prefix.tokens.max())} of the prefix is not in the vocabulary")
    payloads = torch.frombuffer(bytearray().join(prefix.payloads), dtype=torch.uint8)
    tensors = pool.kv.layout.split(payloads.view(len(prefix.payloads), -1))
    tensors["tokens"] = torch.from_numpy(prefix.tokens.astype(np.int64))
    if prefix.windows is not None:
        tensors["swa"] = _unseal_windows(prefix, pool, space)
    try:
        pool.import_prefix(request.slot, tensors)
    except ValueError as error:
        raise StateError(str(error)) from None
    pool.plan_replay(request.slot, request.bounded_prompt)
    request.advance(pool.length(request.slot))
    return request.num_tokens


def _unseal_windows(prefix: Prefix, pool: StatePool, space: str) -> torch.Tensor:
    """uint8 [layers, rows, row bytes]. Raises StateError when they are not those of the prefix' end."""
    assert prefix.windows is not None
    body = bytearray(unseal(space, prefix.windows))
    num_layers, row_bytes = pool.config.first_decoder_layer, pool.kv.layout.window_bytes
    num_tokens, num_rows = len(prefix.tokens), min(len(prefix.tokens), pool.config.sliding_window - 1)
    if len(body) != _NUM_TOKENS.size + num_layers * num_rows * row_bytes:
        raise StateError(f"windows of {len(body)} bytes, not {num_rows} rows of {num_layers} layers")
    if (found := _NUM_TOKENS.unpack_from(body)[0]) != num_tokens:
        raise StateError(f"windows at the end of {found} tokens, the prefix has {num_tokens}")
    return torch.frombuffer(body, dtype=torch.uint8, offset=_NUM_TOKENS.size).view(num_layers, num_rows, row_bytes)
