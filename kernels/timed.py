"""An engine that computes nothing: it keeps the contract and spends time (simulator, front-end benchmark)."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kernels.constraint import Constraint, Logprobs
from kernels.engine import (
    BLOCK_TOKENS,
    Admission,
    Buffer,
    Chunk,
    Counts,
    EngineInfo,
    ImageRows,
    Prefix,
    Sampling,
    StateError,
    Tokens,
)
from kernels.grouping import Member
from kernels.pages import num_blocks_of
from kernels.requests import NONE, Request, Requests, check_restored
from kernels.seal import seal, unseal

_BODY = struct.Struct("<QQQq")  # digest, `drawn`, number of tokens, the sampled token that is not yet fed or -1
_END = struct.Struct("<QQ")
_WINDOWS = struct.Struct("<QQ")  # number of tokens, digest
_WINDOW = 128
_MASK = 2**64 - 1
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class StepCost:
    """Nanoseconds a step takes: `step_ns`, plus so much per prompt token of a prefill or per row of a decode step."""

    step_ns: int = 0
    prefill_token_ns: int = 0
    decode_row_ns: int = 0


@dataclass(slots=True)
class _Request(Request):
    """`digest` of the tokens so far and of the images that begin among them; `drawn`: the part in it of images that
    begin in the block at hand. `ends`: what both were at each block's end.

    `images`: start and digest of those that begin further on. `first`: from there on there would be window rows.
    """

    digest: int = 0
    drawn: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    images: list[tuple[int, int]] = field(default_factory=list)
    first: int = 0

    def feed(self, tokens: Tokens) -> None:
        """Count the next tokens, at least one."""
        cuts = [0, *range(BLOCK_TOKENS - self.num_tokens % BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)]
        parts = np.add.reduceat(_mixed(self.num_tokens, tokens), cuts).tolist()
        start = self.num_tokens
        for part, end in zip(parts, [*cuts[1:], len(tokens)], strict=True):
            self.digest = (self.digest + part) & _MASK
            self.pass_to(start + end)

    def pass_to(self, num_tokens: int) -> None:
        """The tokens before that one are in the digest; it is at most the end of the block."""
        self.num_tokens = num_tokens
        while self.images and self.images[0][0] < num_tokens:
            part = self.images.pop(0)[1]
            self.digest, self.drawn = (self.digest + part) & _MASK, (self.drawn + part) & _MASK
        if num_tokens % BLOCK_TOKENS == 0:
            if num_tokens == BLOCK_TOKENS * (len(self.ends) + 1):  # not replayed
                self.ends.append((self.digest, self.drawn))
            self.drawn = 0


class TimedEngine:
    """Keeps the Engine contract without arithmetic. A step sleeps for its cost, on whatever clock the loop has.

    The token at a position is a fixed function of all tokens and images before it, of the seed when the temperature is
    not 0, and of nothing else: so lost, repeated or swapped tokens anywhere change what follows, as with a real model.
    So do blocks and windows that are not those of the prefix; a replay gives the tokens of a cold run. What the images
    in a prefix are is read off its blocks, as they need not be attached: blocks of other images give other tokens, too.
    Of sampling it knows `temperature` as 0 or not, `seed`, `first_end` and `top_logprobs`, nothing else.
    Tokens are drawn from `vocabulary`; one in `mean_output` is the end-of-sequence token, none when that is 0.
    A step gives a request 1 to `most_accepted` of them, as one that drafts does; how many is drawn as well.
    """

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Sequence[int],
        cost: StepCost | None = None,
        mean_output: int = 0,
        most_accepted: int = 1,
    ) -> None:
        self._info = info
        self._vocabulary = tuple(vocabulary)
        self._cost = cost or StepCost()
        self._mean_output = mean_output
        self._most_accepted = most_accepted
        self._num_drafted = self._num_verified = self._num_accepted = 0
        self._requests = Requests(_Request)
        self._num_blocks = info.capacity_tokens // BLOCK_TOKENS

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def counts(self) -> Counts:
        return Counts(self._num_drafted, self._num_verified, self._num_accepted)

    @property
    def group(self) -> Member | None:
        return None

    async def start(self) -> None:
        pass

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        if num_blocks_of(num_tokens) > self._num_blocks:
            return Admission.NEVER
        admission = self._requests.admit(key, num_tokens, sampling, self._info, bounded_prompt)
        if self._requests.num_blocks > self._num_blocks:
            self._requests.pop(key)
            return Admission.LATER
        return admission

    def grow(self, key: str, num_tokens: int) -> bool:
        num_free = self._num_blocks - self._requests.num_blocks
        return self._requests.grow(key, num_tokens, self._info, num_free) is not None

    def attach(self, key: str, images: Sequence[ImageRows]) -> None:
        request = self._requests.to_attach(key)
        request.images = sorted(
            (image.start, _mix((image.start << 32) + zlib.crc32(image.embeddings) + 1)) for image in images
        )

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        requests = self._requests.to_prefill(chunks)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        spent_ns = self._cost.step_ns + self._cost.prefill_token_ns * num_tokens
        await asyncio.sleep(spent_ns / 1e9)
        for request, chunk in zip(requests, chunks, strict=True):
            request.feed(chunk.tokens)
        return spent_ns

    async def resume(self, key: str, prefix: Prefix) -> int:
        request = self._requests.to_resume(key, prefix, self._info.block_bytes, _WINDOW)
        end = len(prefix.tokens)
        start = end - _WINDOW if prefix.windows is None else end
        found = [_value(payload) for payload in prefix.payloads]
        expected = _Request(end, request.sampling)
        expected.feed(prefix.tokens)
        parts = accumulate((drawn for _, drawn in found), initial=0)
        wanted = [(digest + part) & _MASK for (digest, _), part in zip([(0, 0), *expected.ends], parts, strict=True)]
        pairs = [(value, want) for (value, _), want in zip(found, wanted[1:], strict=True)]
        if prefix.windows is not None:
            pairs.append((self._unseal_windows(prefix.windows, end), wanted[-1]))
        # What is wrong must not add up to what is right.
        wrong = sum(_mix((i << 32) + value + 1 & _MASK) for i, (value, want) in enumerate(pairs) if value != want)
        before = wanted[start // BLOCK_TOKENS]
        request.digest, request.ends, request.num_tokens = (before + wrong) & _MASK, found, start
        request.images = [image for image in request.images if image[0] >= start]
        request.first = start if prefix.windows is None else start - _WINDOW + 1
        return start

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        request = self._requests.to_read(key, first, num)
        return [self._payload(value) for value in request.ends[first : first + num]]

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        request = self._requests.to_read_windows(key, num_tokens)
        oldest = request.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
        if num_tokens < oldest or max(0, num_tokens - _WINDOW + 1) < request.first:
            return None
        digest, _ = request.ends[num_tokens // BLOCK_TOKENS - 1]
        return seal(self._info.space, _WINDOWS.pack(num_tokens, digest))

    async def export(self, key: str) -> bytes:
        request = self._requests.to_export(key)
        body = _BODY.pack(request.digest, request.drawn, request.num_tokens, request.last)
        return seal(self._info.layout, body + b"".join(_END.pack(*end) for end in request.ends))

    async def restore(self, key: str, state: bytes) -> None:
        request = self._requests.to_restore(key)
        body = unseal(self._info.layout, state)
        if len(body) < _BODY.size:
            raise StateError(f"state body has {len(body)} bytes, expected {_BODY.size} and more")
        digest, drawn, num_tokens, last = _BODY.unpack_from(body)
        check_restored(request, num_tokens)
        if len(body) != _BODY.size + _END.size * (num_tokens // BLOCK_TOKENS):
            raise StateError(f"state body of {num_tokens} tokens has {len(body)} bytes")
        request.digest, request.drawn, request.num_tokens, request.last = digest, drawn, num_tokens, last
        request.ends = list(_END.iter_unpack(body[_BODY.size :]))
        request.first = max(0, num_tokens - _WINDOW + 1)

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        requests = self._requests.to_decode(keys)
        await asyncio.sleep((self._cost.step_ns + self._cost.decode_row_ns * len(keys)) / 1e9)
        return [self._accepted(request) for request in requests]

    def constrain(self, key: str, constraint: Constraint) -> None:
        self._requests[key].constraint = constraint

    def logprobs(self, key: str) -> list[Logprobs]:
        return self._requests.told(key)

    def free(self, key: str) -> None:
        self._requests.pop(key)

    async def close(self) -> None:
        self._requests = Requests(_Request)

    def _payload(self, end: tuple[int, int]) -> bytes:
        return _filled(_END.pack(*end), self._info.block_bytes)

    def _unseal_windows(self, windows: bytes, num_tokens: int) -> int:
        """The digest in it. Raises StateError when it is not that at the end of `num_tokens`."""
        body = unseal(self._info.space, windows)
        if len(body) != _WINDOWS.size:
            raise StateError(f"windows of {len(body)} bytes, expected {_WINDOWS.size}")
        found, digest = _WINDOWS.unpack(body)
        if found != num_tokens:
            raise StateError(f"windows at the end of {found} tokens, the prefix has {num_tokens}")
        return int(digest)

    def _accepted(self, request: _Request) -> list[int]:
        """The tokens of one step: one behind the prompt, then as many as are foreseen and have room."""
        num = 1
        if request.last != NONE:
            most = min(self._most_accepted, request.num_reserved - request.num_tokens)
            if most > 1:
                num = min(1 + _mix(request.digest) % self._most_accepted, most)
            self._num_drafted += most - 1
            self._num_verified += most
            self._num_accepted += num - 1
        tokens: list[int] = []
        request.logprobs = []
        for _ in range(num):
            token = self._next(request)
            if token == NONE:
                break
            tokens.append(token)
            if request.constraint is not None:
                request.constraint.accept([token])
                if token == self._info.eos_token:
                    break  # behind it a constraint allows nothing
        return tokens

    def _next(self, request: _Request) -> int:
        """The next token, NONE when its constraint cannot say what may follow."""
        if request.last != NONE:
            request.digest = (request.digest + _mix((request.num_tokens << 32) + request.last + 1)) & _MASK
            request.pass_to(request.num_tokens + 1)
        draw = request.digest ^ (request.sampling.seed * _GAMMA if request.sampling.temperature else 0)
        draw = _mix((draw + request.num_tokens * _GAMMA) & _MASK)
        is_end = self._mean_output > 0 and draw % self._mean_output == 0
        is_end &= request.num_tokens >= request.sampling.first_end
        last = self._info.eos_token if is_end else self._vocabulary[(draw >> 32) % len(self._vocabulary)]
        if request.constraint is not None:
            last = self._allowed(request.constraint, last, draw >> 32)
            if last == NONE:
                return NONE
        request.last = last
        if request.sampling.top_logprobs >= 0:
            likely = zip(self._vocabulary, range(request.sampling.top_logprobs), strict=False)
            request.logprobs.append(Logprobs(-float(draw % 8), [(token, -float(place)) for token, place in likely]))
        return last

    def _allowed(self, constraint: Constraint, wanted: int, draw: int) -> int:
        """`wanted` where it is allowed, else one of those that are."""
        bits = constraint.allow([])
        if not len(bits):
            return NONE
        if bits[0, wanted // 32] >> wanted % 32 & 1:
            return wanted
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
        return int(allowed[draw % len(allowed)])


def _mix(z: int) -> int:
    """SplitMix64's finaliser of a 64-bit word."""
    z = (z ^ (z >> 30)) * _MIX1 & _MASK
    z = (z ^ (z >> 27)) * _MIX2 & _MASK
    return z ^ (z >> 31)


def _mixed(start: int, tokens: Tokens) -> npt.NDArray[np.uint64]:
    """`_mix(position * 2**32 + token + 1)` of each: any cut of a prompt adds up to the same."""
    position = np.arange(start, start + len(tokens), dtype=np.uint64)
    z = (position << np.uint64(32)) + tokens.astype(np.uint64) + np.uint64(1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


def _filled(part: bytes, num_bytes: int) -> bytes:
    """`part` over and over."""
    return (part * -(-num_bytes // len(part)))[:num_bytes]


def _value(payload: Buffer) -> tuple[int, int]:
    """What `_payload` was made of, or other numbers for other bytes, wherever they differ."""
    whole = bytes(payload)
    if len(whole) < _END.size or whole != _filled(whole[: _END.size], len(whole)):
        return _mix(zlib.crc32(whole) + 1), 0
    digest, drawn = _END.unpack_from(whole)
    return digest, drawn
