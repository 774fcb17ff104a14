"""An engine that computes nothing: it keeps the contract and spends time (simulator, front-end benchmark)."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.engine import Admission, Chunk, EngineInfo, ImageRows, Sampling, StateError, Tokens
from kernels.requests import NONE, Request, Requests, check_restored
from kernels.seal import seal, unseal

_BODY = struct.Struct("<QQq")  # digest, number of tokens, the sampled token that is not yet fed or -1
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
    digest: int = 0


class TimedEngine:
    """Keeps the Engine contract without arithmetic. A step sleeps for its cost, on whatever clock the loop has.

    The token at a position is a fixed function of all tokens and images before it, of the seed when the temperature is
    not 0, and of nothing else: so lost, repeated or swapped tokens anywhere change what follows, as with a real model.
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
        self._requests = Requests(_Request)

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        pass

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        return self._requests.admit(key, num_tokens, sampling, self._info, bounded_prompt)

    def attach(self, key: str, images: Sequence[ImageRows]) -> None:
        request = self._requests.to_attach(key)
        for image in images:
            request.digest = (request.digest + _mix((image.start << 32) + zlib.crc32(image.embeddings) + 1)) & _MASK

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        requests = self._requests.to_prefill(chunks)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        spent_ns = self._cost.step_ns + self._cost.prefill_token_ns * num_tokens
        await asyncio.sleep(spent_ns / 1e9)
        for request, chunk in zip(requests, chunks, strict=True):
            request.digest = (request.digest + _digest(request.num_tokens, chunk.tokens)) & _MASK
            request.num_tokens += len(chunk.tokens)
        return spent_ns

    async def export(self, key: str) -> bytes:
        request = self._requests.to_export(key)
        return seal(self._info.layout, _BODY.pack(request.digest, request.num_tokens, request.last))

    async def restore(self, key: str, state: bytes) -> None:
        request = self._requests.to_restore(key)
        body = unseal(self._info.layout, state)
        if len(body) != _BODY.size:
            raise StateError(f"state body has {len(body)} bytes, expected {_BODY.size}")
        digest, num_tokens, last = _BODY.unpack(body)
        check_restored(request, num_tokens)
        request.digest, request.num_tokens, request.last = digest, num_tokens, last

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        requests = self._requests.to_decode(keys)
        await asyncio.sleep((self._cost.step_ns + self._cost.decode_row_ns * len(keys)) / 1e9)
        return [self._accepted(request) for request in requests]

    def free(self, key: str) -> None:
        self._requests.pop(key)

    async def close(self) -> None:
        self._requests = Requests(_Request)

    def _accepted(self, request: _Request) -> list[int]:
        """The tokens of one step: one behind the prompt, then as many as are foreseen and have room."""
        num = 1
        if request.last != NONE:
            room = request.num_reserved - request.num_tokens
            num = min(1 + _mix(request.digest) % self._most_accepted, room)
        return [self._next(request) for _ in range(num)]

    def _next(self, request: _Request) -> int:
        if request.last != NONE:
            request.digest = (request.digest + _mix((request.num_tokens << 32) + request.last + 1)) & _MASK
            request.num_tokens += 1
        draw = request.digest ^ (request.sampling.seed * _GAMMA if request.sampling.temperature else 0)
        draw = _mix((draw + request.num_tokens * _GAMMA) & _MASK)
        if self._mean_output and draw % self._mean_output == 0:
            request.last = self._info.eos_token
        else:
            request.last = self._vocabulary[(draw >> 32) % len(self._vocabulary)]
        return request.last


def _mix(z: int) -> int:
    """SplitMix64's finaliser of a 64-bit word."""
    z = (z ^ (z >> 30)) * _MIX1 & _MASK
    z = (z ^ (z >> 27)) * _MIX2 & _MASK
    return z ^ (z >> 31)


def _digest(start: int, tokens: Tokens) -> int:
    """The sum of `_mix(position * 2**32 + token + 1)`: any cut of a prompt adds up to the same."""
    position = np.arange(start, start + len(tokens), dtype=np.uint64)
    z = (position << np.uint64(32)) + tokens.astype(np.uint64) + np.uint64(1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    z = z ^ (z >> np.uint64(31))
    return int(z.sum(dtype=np.uint64))
