"""The requests an engine holds, and the order of calls that its contract allows; the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kernels.constraint import Constraint, Logprobs
from kernels.engine import (
    BLOCK_TOKENS,
    Admission,
    Chunk,
    EngineInfo,
    ImageRows,
    Prefix,
    Sampling,
    StateError,
)
from kernels.pages import num_blocks_of

NONE = -1  # no token


@dataclass(slots=True)
class Request:
    """One admitted request: `num_tokens` of its state are computed, `last` is sampled and not yet fed (or NONE).

    Of its first `bounded_prompt` tokens the decoder layers compute the last window only. `logprobs`: of its last step.
    """

    num_reserved: int
    sampling: Sampling
    bounded_prompt: int = 0
    num_tokens: int = 0
    last: int = NONE
    constraint: Constraint | None = None
    logprobs: list[Logprobs] = field(default_factory=list)


R = TypeVar("R", bound=Request)


class Requests(Generic[R]):
    """Admitted requests by key. Every check comes before any change, so a refused call changes nothing."""

    def __init__(self, make: Callable[[int, Sampling, int], R]) -> None:
        self._make = make
        self._requests: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, key: str) -> R:
        return self._requests[key]

    def admit(self, key: str, num_tokens: int, sampling: Sampling, info: EngineInfo, bounded_prompt: int) -> Admission:
        """Raises ValueError when the key is admitted already, or for numbers that make no sense."""
        if key in self._requests:
            raise ValueError(f"request {key} is already admitted")
        if num_tokens < 1:
            raise ValueError(f"request {key} reserves {num_tokens} tokens")
        if not 0 <= bounded_prompt <= num_tokens:
            raise ValueError(f"request {key} reserves {num_tokens} tokens for a prompt of {bounded_prompt}")
        if num_tokens > info.max_tokens:
            return Admission.NEVER
        if len(self._requests) >= info.num_slots:
            return Admission.LATER
        self._requests[key] = self._make(num_tokens, sampling, bounded_prompt)
        return Admission.OK

    def grow(self, key: str, num_tokens: int, info: EngineInfo, num_free: int) -> int | None:
        """Count `num_tokens` as reserved; the blocks that takes beside those it has, None when not as many are free or
        no request may be as long. Less than it has changes nothing. Raises KeyError."""
        request = self._requests[key]
        if num_tokens > info.max_tokens:
            return None
        num_more = max(num_blocks_of(num_tokens) - num_blocks_of(request.num_reserved), 0)
        if num_more > num_free:
            return None
        request.num_reserved = max(request.num_reserved, num_tokens)
        return num_more

    @property
    def num_blocks(self) -> int:
        """Of 128 tokens, reserved by all of them."""
        return sum(num_blocks_of(request.num_reserved) for request in self._requests.values())

    def pop(self, key: str) -> R | None:
        """Forget a request; None when there is none of that key."""
        return self._requests.pop(key, None)

    def to_prefill(self, chunks: Sequence[Chunk]) -> list[R]:
        """The requests of the chunks. Raises KeyError, or ValueError for a call out of order or too many tokens."""
        requests = self._distinct([chunk.key for chunk in chunks])
        for chunk, request in zip(chunks, requests, strict=True):
            if len(chunk.tokens) == 0:
                raise ValueError(f"request {chunk.key}: an empty chunk")
            if request.last != NONE:
                raise ValueError(f"request {chunk.key} is generating already")
            _check_room(chunk.key, request, len(chunk.tokens))
        return requests

    def to_decode(self, keys: Sequence[str]) -> list[R]:
        """The requests of a decode step. Raises KeyError, or ValueError without a prompt or without room."""
        requests = self._distinct(keys)
        for key, request in zip(keys, requests, strict=True):
            if request.num_tokens == 0:
                raise ValueError(f"request {key} has no prompt")
            _check_whole(key, request)
            _check_room(key, request, int(request.last != NONE))
        return requests

    def told(self, key: str) -> list[Logprobs]:
        """Those of its last step. Raises KeyError, or ValueError when its sampling asks for none."""
        request = self._requests[key]
        if request.sampling.top_logprobs < 0:
            raise ValueError(f"request {key} asked for no logprobs")
        return request.logprobs

    def to_export(self, key: str) -> R:
        """Raises KeyError, or ValueError when there is nothing to export."""
        request = self._requests[key]
        if request.num_tokens == 0:
            raise ValueError(f"request {key} has no state")
        _check_whole(key, request)
        return request

    def to_attach(self, key: str) -> R:
        """Raises KeyError, or ValueError when the request has state already."""
        request = self._requests[key]
        if request.num_tokens:
            raise ValueError(f"request {key} has state already")
        return request

    def to_restore(self, key: str) -> R:
        """As `to_attach`; ValueError, too, for a request whose prompt is to be computed here."""
        request = self.to_attach(key)
        if request.bounded_prompt:
            raise ValueError(f"request {key} was admitted with a bounded prompt, which is computed from its start")
        return request

    def to_resume(self, key: str, prefix: Prefix, block_bytes: int, window: int) -> R:
        """As `to_attach`; ValueError, too, when less than a `window` of a bounded prompt is left to compute, or the
        blocks are not those of the tokens; StateError when one is not of `block_bytes`."""
        request, num_tokens = self.to_attach(key), len(prefix.tokens)
        if not num_tokens or num_tokens != BLOCK_TOKENS * len(prefix.payloads):
            raise ValueError(f"request {key}: a prefix of {num_tokens} tokens has {len(prefix.payloads)} blocks")
        if request.bounded_prompt - num_tokens < window:
            raise ValueError(
                f"request {key}: a prefix of {num_tokens} tokens leaves less than a window of {window}"
                f" of a bounded prompt of {request.bounded_prompt}"
            )
        for number, payload in enumerate(prefix.payloads):
            if (num_bytes := memoryview(payload).nbytes) != block_bytes:
                raise StateError(f"block {number} has {num_bytes} bytes, expected {block_bytes}")
        return request

    def to_read(self, key: str, first: int, num: int) -> R:
        """Raises KeyError, or ValueError unless these blocks are computed."""
        request, end = self._requests[key], (first + num) * BLOCK_TOKENS
        if first < 0 or num < 0 or end > request.num_tokens:
            raise ValueError(f"request {key}: {request.num_tokens} tokens are computed, blocks {first} + {num} are not")
        return request

    def to_read_windows(self, key: str, num_tokens: int) -> R:
        """Raises KeyError, or ValueError unless the first `num_tokens` are whole blocks, one or more, and computed."""
        if num_tokens < 1 or num_tokens % BLOCK_TOKENS:
            raise ValueError(f"request {key}: {num_tokens} tokens are no whole blocks")
        return self.to_read(key, 0, num_tokens // BLOCK_TOKENS)

    def _distinct(self, keys: Sequence[str]) -> list[R]:
        requests = [self._requests[key] for key in keys]
        if len(set(keys)) != len(keys):
            raise ValueError("a request may take part in a step once only")
        return requests


def check_images(request: Request, images: Sequence[ImageRows], row_bytes: int) -> None:
    """Raises ValueError when rows are not whole ones of `row_bytes`, or spans overlap or do not fit the reservation."""
    end = 0
    for image in sorted(images, key=lambda image: image.start):
        num_rows, rest = divmod(len(image.embeddings), row_bytes)
        if rest or not num_rows:
            raise ValueError(f"{len(image.embeddings)} bytes of an image are not rows of {row_bytes}")
        if image.start < end:
            raise ValueError(f"an image at position {image.start} begins within the one before, or the start")
        end = image.start + num_rows
    if end > request.num_reserved:
        raise ValueError(f"images reach position {end}, the request reserved {request.num_reserved} tokens")


def check_restored(request: Request, num_tokens: int) -> None:
    """Raises StateError when a state of `num_tokens` has no room in the request."""
    if not 1 <= num_tokens <= request.num_reserved:
        raise StateError(f"a state of {num_tokens} tokens does not fit in the {request.num_reserved} reserved")


def _check_whole(key: str, request: Request) -> None:
    if request.num_tokens < request.bounded_prompt:
        raise ValueError(f"request {key}: {request.num_tokens} of {request.bounded_prompt} prompt tokens are computed")


def _check_room(key: str, request: Request, num_tokens: int) -> None:
    total = request.num_tokens + num_tokens
    if total > request.num_reserved:
        raise ValueError(f"request {key} reserved {request.num_reserved} tokens, {total} are needed")
