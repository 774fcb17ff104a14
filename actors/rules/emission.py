"""Gathering tokens of many requests into as few messages as the size contract allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.failure import Code, Failure
from schemas.request import End, Failed, Resend, TokensEmitted

MAX_ENTRIES = 1024
MAX_TOKENS = 16384
"""Together at most about 150 KiB in msgpack: 1024 entries of 70 bytes and 16384 tokens of 5 bytes."""


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

    def add(self, request_id: str, epoch: int, first_index: int, tokens: Sequence[int], end: End | None = None) -> None:
        """Tokens of a request from `first_index` on, and its end if these were the last. Order is kept."""
        while len(tokens) > MAX_TOKENS:
            self.add(request_id, epoch, first_index, tokens[:MAX_TOKENS])
            first_index, tokens = first_index + MAX_TOKENS, tokens[MAX_TOKENS:]
        if len(self._ids) == MAX_ENTRIES or len(self._tokens) + len(tokens) > MAX_TOKENS:
            self._close()
        if end is not None:
            self._ends.append((len(self._ids), end))
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
