"""The engine contract: what prefill and decode actors drive. Free of torch, free of messages.

An engine holds the state of requests in slots. One actor owns it and calls it from one task, one step at a time; steps
are awaitable, so the caller's loop answers while they compute.

    engine.admit("r1", 300, sampling, bounded_prompt=200) # OK | LATER | NEVER
    engine.attach("r1", [ImageRows(17, embeddings)])      # a prompt with images: what an Encoder made of them
    await engine.prefill([Chunk("r1", tokens)])           # as many chunks as you like, of many requests at once
    state = await engine.export("r1"); engine.free("r1")
    ...
    other.admit("r1", num_tokens=300, sampling); await other.restore("r1", state)
    (new,) = await other.decode(["r1"])                   # the next tokens of r1, from index 0 on

What is computed of a prompt can be kept, by blocks of 128 tokens, and spares another request with the same beginning:

    payloads = await engine.blocks("r1", 0, 2)            # of tokens 0 to 255
    windows = await engine.windows("r1", 256)             # and what goes with them at their end, while it is there
    engine.admit("r2", ..., bounded_prompt=len(tokens))
    await engine.resume("r2", Prefix(tokens[:256], payloads, windows))
    await engine.prefill([Chunk("r2", tokens[256:])])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kernels.constraint import Constraint, Logprobs
from kernels.grouping import Member

Tokens = npt.NDArray[np.uint32]
Buffer = bytes | bytearray | memoryview
Pixels = npt.NDArray[np.uint8]

BLOCK_TOKENS = 128
"""Of one cached block: the grain of `Prefix`; a multiple of every compression ratio."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A token is argmax(logits / temperature + Gumbel(seed, position)) after top-k, min-p and top-p, in this order;
    temperature 0 is greedy.

    The end-of-sequence token is not sampled for positions before `first_end`. `top_logprobs`: how many of the likeliest
    tokens `Engine.logprobs` names beside the one sampled; -1: it is not asked. `logit_bias`: (token, what is added to
    its logit), each token once. `top_k`: of the likeliest so many, 0 of all; `min_p`: of those at least so many
    times as likely as the likeliest.
    """

    temperature: float
    top_p: float
    seed: int
    first_end: int = 0
    top_logprobs: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    min_p: float = 0.0


class Admission(Enum):
    """OK: there is a slot. LATER: not now, ask again when something was freed. NEVER: it cannot fit even alone."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next prompt tokens of one request, uint32 [num_tokens], at least one."""

    key: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What an Encoder made of one image, and the position in the prompt of the first token of its span."""

    start: int
    embeddings: bytes


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt, computed before: `tokens` uint32 [128 * blocks], the payload of each block, and the
    window rows at its end, without which the last block is computed again (encoder replay, spec §5: approximate)."""

    tokens: Tokens
    payloads: Sequence[Buffer]
    windows: bytes | None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. `layout` names the format of exported state: engines with equal layouts understand each other.
    `space` names what its blocks are, weights and layout, once the engine is started ("" before), and `block_bytes` is
    the size of one's payload.

    `max_tokens` is the longest prompt plus output; `num_slots` how many requests it can hold, `capacity_tokens` of how
    many tokens together; `max_step_tokens` the most tokens one prefill step should be given.
    """

    model: str
    layout: str
    vocab_size: int
    eos_token: int
    max_tokens: int
    num_slots: int
    max_step_tokens: int
    capacity_tokens: int
    space: str
    block_bytes: int


class Counts(NamedTuple):
    """Of all decode steps: tokens drafted, rows verified (the token that is fed, and its drafts), drafts accepted."""

    drafted: int
    verified: int
    accepted: int


class StateError(ValueError):
    """An exported state that cannot be restored here: wrong layout, or damaged."""


class Engine(Protocol):
    """See the module's docstring for the order of calls. Keys are request ids; an unknown key is a KeyError.

    A step that raises ValueError leaves its own requests undefined, to be freed, and all others as they were.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def counts(self) -> Counts:
        """Since the start."""
        ...

    @property
    def group(self) -> Member | None:
        """The group it is in, once it is started; None when it has all experts itself.

        In a group `prefill` and `decode` take part in a step also when they are given nothing, and raise GroupError
        when a rank is gone, until those that are left have met again. A step of `decode` that failed so is undone; one
        of `prefill` leaves its own requests undefined, unless it was Regrouping.
        """
        ...

    async def start(self) -> None:
        """Load weights and warm up; in a group that is done at the first meeting."""
        ...

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        """Reserve a slot for prompt plus output of `num_tokens`. On anything but OK nothing changed.

        bounded_prompt: the length of the prompt that is going to be computed here, when its decoder layers may compute
        its last window only (bounded replay, spec §5: about half the work, approximate). 0: every layer computes
        every token, which is exact.
        """
        ...

    def grow(self, key: str, num_tokens: int) -> bool:
        """Reserve room for `num_tokens` of prompt plus output, if that is more than it has; no state is moved.

        False, and nothing changed: there is no room now, or no request may be as long. Not while a step is running.
        """
        ...

    def attach(self, key: str, images: Sequence[ImageRows]) -> None:
        """Give the images of an admitted request's prompt, once, before its first chunk and before `resume`.

        Their rows take the place of token embeddings; the prompt has the model's image token at all their positions.
        Those that end at or before the position that `resume` will return may be left out: nothing reads them.
        Raises ValueError, before anything changes, for a request with state, a model without vision, rows of the wrong
        size or not finite, or spans that overlap or reach past the reservation.
        """
        ...

    def constrain(self, key: str, constraint: Constraint) -> None:
        """Sample only what it allows, from the next step on. It is told of each token. Not while a step is running."""
        ...

    async def resume(self, key: str, prefix: Prefix) -> int:
        """Fill an admitted slot, its images attached, with blocks of its prompt. The position prefill goes on from:
        the end of the prefix, or one window (of the published model: a block) before it when there are no windows.

        A request that goes on from windows is bit for bit one that was computed from its start. Windows of decoder
        layers are not kept: raises ValueError unless the prompt is bounded and a window of it is left to compute.
        Raises StateError when payloads or windows are not what they should be; the slot is then still admitted, empty.
        """
        ...

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        """The payloads of complete blocks, restored ones too. Raises ValueError when not all tokens are computed."""
        ...

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        """The window rows at the end of a request's first `num_tokens`, whole blocks, for `Prefix.windows`.

        None when they are gone: they are kept at least at the ends of the last two whole blocks, as far as those rows
        were computed here, or came with `resume`. Raises ValueError when not all tokens are computed.
        """
        ...

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        """One batched step over all chunks; the elapsed nanoseconds. Any cut of a prompt gives the same state.

        Raises ValueError, before anything changes, when the images attached do not stand where the image tokens are:
        an engine that computes would have to make an image up, or read one where text is.
        """
        ...

    async def export(self, key: str) -> bytes:
        """The state of a request, complete: whoever restores it goes on with the same tokens.

        Raises ValueError for a bounded prompt that is not computed to its end, and for one whose numbers overflowed.
        """
        ...

    async def restore(self, key: str, state: bytes) -> None:
        """Fill an admitted slot from an exported state. Raises StateError; the slot is then still admitted, empty."""
        ...

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        """One batched step: the new tokens of each request, one or more each, end-of-sequence token included.

        How many there are depends on how well they were foreseen; which they are does not. What follows an
        end-of-sequence token is what the model would go on with. None at all: what was computed of that request are no
        numbers, or its constraint cannot say what is allowed: it cannot go on; free it.
        """
        ...

    def logprobs(self, key: str) -> list[Logprobs]:
        """Of each token of the request's last step, if its sampling asks for them (else ValueError)."""
        ...

    def free(self, key: str) -> None:
        """Let go of a slot. Idempotent. Not while a step is running."""
        ...

    async def close(self) -> None:
        """Let go of everything. Idempotent, also after a failed start."""
        ...


class Encoder(Protocol):
    """What vision actors drive: images to the rows that stand for them in a prompt. One call at a time."""

    async def start(self) -> None:
        """Load weights and warm up."""
        ...

    async def encode(self, images: Sequence[Pixels]) -> list[bytes]:
        """The rows of each image's whole span, delimiters included: fp32 [num_tokens, hidden_size], little-endian.

        An image is uint8 [height, width, 3], RGB, sized as the model wants it. Its rows do not depend on the others.
        Raises ValueError for any other shape or type, before anything is computed.
        """
        ...

    async def close(self) -> None:
        """Let go of everything. Idempotent, also after a failed start."""
        ...
