"""Gathering tokens of many requests into as few messages as the size contract allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.failure import Code, Failure
from schemas.request import End, Failed, Resend, TokensEmitted

MAX_TOKENS = 16384
MAX_BYTES = 192 * 1024
"""Of one message, by the upper estimate of `_size_bytes`: well under the 256 KiB of the size contract."""

TOKEN_BYTES = 5
ENTRY_BYTES = 48
END_BYTES = 128


def _size_bytes(request_id: str, num_tokens: int, end: End | None) -> int:
    """At most what an entry takes in msgpack, all its arrays counted."""
    size = ENTRY_BYTES + 4 * len(request_id) + TOKEN_BYTES * num_tokens
    if isinstance(end, Failed):
        size += len(end.failure.message.encode()) + len(end.failure.field.encode())
    return size if end is None else size + END_BYTES


class Emission:
    """A batch under construction for one destination; `take` gives the messages and starts anew."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._done: list[TokensEmitted] = []
        self._start()

    def _start(self) -> None:
        self._ids: list[str] = []
        self._epochs: list[int] = []
        self._firsts: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[int] = []
        self._ends: list[tuple[int, End]] = []
        self._cached: list[tuple[int, int]] = []
        self._num_bytes = 0

    def add(
        self,
        request_id: str,
        epoch: int,
        first_index: int,
        tokens: Sequence[int],
        end: End | None = None,
        num_cached: int = 0,
    ) -> None:
        """Tokens of a request from `first_index` on, and its end if these were the last. Order is kept.

        `num_cached`: of its prompt, to be said with the first tokens.
        """
        while len(tokens) > MAX_TOKENS:
            self.add(request_id, epoch, first_index, tokens[:MAX_TOKENS], None, num_cached)
            num_cached = 0
            first_index, tokens = first_index + MAX_TOKENS, tokens[MAX_TOKENS:]
        size_bytes = _size_bytes(request_id, len(tokens), end)
        if self._num_bytes + size_bytes > MAX_BYTES:
            self._close()
        self._num_bytes += size_bytes
        if end is not None:
            self._ends.append((len(self._ids), end))
        if num_cached:
            self._cached.append((len(self._ids), num_cached))
        self._ids.append(request_id)
        self._epochs.append(epoch)
        self._firsts.append(first_index)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)

    def _close(self) -> None:
        if self._ids:
            self._done.append(
                TokensEmitted(
                    source=self._source,
                    request_ids=self._ids,
                    epochs=self._epochs,
                    first_indexes=self._firsts,
                    counts=self._counts,
                    tokens=self._tokens,
                    ends=self._ends,
                    cached=self._cached,
                )
            )
            self._start()

    def take(self) -> list[TokensEmitted]:
        """All messages so far, in order; the batch is empty afterwards."""
        self._close()
        done, self._done = self._done, []
        return done


Held = tuple[int, Sequence[int], End | None]
"""What a holder knows of a request: its epoch, all tokens emitted so far, and the end if there was one."""


def resend_answer(source: str, resend: Resend, find: Callable[[str], Held | None]) -> TokensEmitted:
    """One message with as much as fits of what was asked for.

    What did not fit is left out from the back, ends of cut requests included: the asker sees the gap and asks again. A
    request that `find` does not know ends as `worker_lost`: whoever held it has restarted since.
    """
    room = MAX_TOKENS
    emission = Emission(source)
    for request_id, first, epoch in zip(resend.request_ids, resend.first_indexes, resend.epochs, strict=True):
        held = find(request_id)
        if held is None:
            lost = Failure(code=Code.WORKER_LOST, message=f"{source} does not hold this request (any more)")
            emission.add(request_id, epoch, first, [], Failed(failure=lost))
            continue
        epoch, tokens, end = held
        fitting = tokens[first : first + room]
        emission.add(request_id, epoch, first, fitting, end if first + len(fitting) >= len(tokens) else None)
        room -= len(fitting)
    messages = emission.take()
    if messages:
        return messages[0]
    return TokensEmitted(source=source, request_ids=[], epochs=[], first_indexes=[], counts=[], tokens=[])
