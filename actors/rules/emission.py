"""Gathering tokens of many requests into as few messages as the size contract allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from actors.rules.logprobs import KeptLogprobs, cut, num_likeliest
from schemas.failure import Code, Failure
from schemas.request import Failed, LastWord, Resend, TokenLogprobs, TokensEmitted

MAX_TOKENS = 16384
MAX_BYTES = 192 * 1024
"""Of one message, by the upper estimate of `_size_bytes`: well under the 256 KiB of the size contract."""

TOKEN_BYTES = 5
LOGPROB_BYTES = 9
ENTRY_BYTES = 48
END_BYTES = 128
LOGPROBS_BYTES = 96


def _size_bytes(request_id: str, num_tokens: int, end: LastWord | None) -> int:
    """At most what an entry takes in msgpack, all its arrays counted, without its logprobs."""
    size = ENTRY_BYTES + 4 * len(request_id) + TOKEN_BYTES * num_tokens
    if isinstance(end, Failed):
        size += len(end.failure.message.encode()) + len(end.failure.field.encode())
    return size if end is None else size + END_BYTES


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    """At most what they take."""
    return LOGPROBS_BYTES + LOGPROB_BYTES * len(logprobs.sampled) + (TOKEN_BYTES + LOGPROB_BYTES) * len(logprobs.top)


def _most_tokens(logprobs: TokenLogprobs) -> int:
    """Of one entry with logprobs: so many take half of a message at most."""
    of_one = TOKEN_BYTES + LOGPROB_BYTES + num_likeliest(logprobs) * (TOKEN_BYTES + LOGPROB_BYTES)
    return min(MAX_TOKENS, MAX_BYTES // 2 // of_one)


class Emission:
    """A batch under construction for one destination; `take` gives the messages and starts anew.

    What comes of a request while the batch waits joins what is there of it, except logprobs: one entry, so one event
    at the client, however many steps it was.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._done: list[TokensEmitted] = []
        self._start()

    def _start(self) -> None:
        self._ids: list[str] = []
        self._epochs: list[int] = []
        self._firsts: list[int] = []
        self._tokens: list[list[int]] = []
        self._open: dict[str, int] = {}  # entries that more may join, by request
        self._ends: list[tuple[int, LastWord]] = []
        self._cached: list[tuple[int, int]] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self._num_bytes = 0

    def add(
        self,
        request_id: str,
        epoch: int,
        first_index: int,
        tokens: Sequence[int],
        end: LastWord | None = None,
        num_cached: int = 0,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Tokens of a request from `first_index` on, and the last word on it if these are the last. Order is kept.

        `num_cached`: of its prompt, to be said with the first tokens. `logprobs`: of these tokens, if it asked.
        """
        most = MAX_TOKENS if logprobs is None else _most_tokens(logprobs)
        while len(tokens) > most:
            self.add(
                request_id, epoch, first_index, tokens[:most], None, num_cached, logprobs and cut(logprobs, 0, most)
            )
            num_cached = 0
            logprobs = logprobs and cut(logprobs, most, len(tokens))
            first_index, tokens = first_index + most, tokens[most:]
        if logprobs is None and not num_cached and self._join(request_id, epoch, first_index, tokens, end):
            return
        size_bytes = _size_bytes(request_id, len(tokens), end)
        if logprobs is not None:
            size_bytes += _logprobs_bytes(logprobs)
        if self._num_bytes + size_bytes > MAX_BYTES:
            self._close()
        self._num_bytes += size_bytes
        if end is not None:
            self._ends.append((len(self._ids), end))
        if num_cached:
            self._cached.append((len(self._ids), num_cached))
        if logprobs is not None and tokens:
            self._logprobs.append((len(self._ids), logprobs))
        if logprobs is None and end is None:
            self._open[request_id] = len(self._ids)
        self._ids.append(request_id)
        self._epochs.append(epoch)
        self._firsts.append(first_index)
        self._tokens.append(list(tokens))

    def _join(self, request_id: str, epoch: int, first_index: int, tokens: Sequence[int], end: LastWord | None) -> bool:
        """Whether these went to the entry of this request, which they go on from."""
        at = self._open.get(request_id)
        if at is None or self._epochs[at] != epoch or self._firsts[at] + len(self._tokens[at]) != first_index:
            return False
        size_bytes = _size_bytes("", len(tokens), end)
        if len(self._tokens[at]) + len(tokens) > MAX_TOKENS or self._num_bytes + size_bytes > MAX_BYTES:
            return False
        self._num_bytes += size_bytes
        self._tokens[at].extend(tokens)
        if end is not None:
            self._ends.append((at, end))
        return True

    def _close(self) -> None:
        if self._ids:
            self._done.append(
                TokensEmitted(
                    source=self._source,
                    request_ids=self._ids,
                    epochs=self._epochs,
                    first_indexes=self._firsts,
                    counts=[len(tokens) for tokens in self._tokens],
                    tokens=list(chain.from_iterable(self._tokens)),
                    ends=self._ends,
                    cached=self._cached,
                    logprobs=self._logprobs,
                )
            )
            self._start()

    def take(self) -> list[TokensEmitted]:
        """All messages so far, in order; the batch is empty afterwards."""
        self._close()
        done, self._done = self._done, []
        return done


class Held(NamedTuple):
    """What a holder knows of a request: the tokens emitted so far, from index `start` on, what was said of them, and
    the last word on it if there was one."""

    epoch: int
    tokens: Sequence[int]
    end: LastWord | None
    logprobs: KeptLogprobs | None = None
    start: int = 0


def resend_answer(source: str, resend: Resend, find: Callable[[str], Held | None]) -> TokensEmitted:
    """One message with as much as fits of what was asked for.

    What did not fit is left out from the back, ends of cut requests included: the asker sees the gap and asks again. A
    request that `find` does not know ends as `worker_lost`: whoever held it has restarted since. So does one that was
    held under an earlier epoch only, and one whose logprobs are asked for when they are not kept any more.
    """
    room = MAX_TOKENS
    emission = Emission(source)
    for request_id, first, epoch in zip(resend.request_ids, resend.first_indexes, resend.epochs, strict=True):
        held = find(request_id)
        if held is None or 0 < held.epoch < epoch:  # 0: its claim is not answered yet
            emission.add(request_id, epoch, first, [], _lost(f"{source} does not hold this request (any more)"))
            continue
        _, tokens, end, kept, start = held
        kept = None if resend.without_logprobs else kept
        num_tokens = start + len(tokens)
        if first < start:
            emission.add(request_id, epoch, first, [], _lost(f"{source} holds output from {start} on"))
            continue
        if kept is not None and first < min(kept.first, num_tokens):
            emission.add(request_id, held.epoch, first, [], _lost(f"{source} keeps no logprobs of so long ago"))
            continue
        stop = min(first + room, num_tokens)
        logprobs = None
        if kept is not None and stop > first:
            stop = min(stop, first + _most_tokens(kept.get(first, first + 1)))
            logprobs = kept.get(first, stop)
        said = end if stop >= num_tokens else None
        emission.add(request_id, held.epoch, first, tokens[first - start : stop - start], said, logprobs=logprobs)
        room -= max(stop - first, 0)
    messages = emission.take()
    if messages:
        return messages[0]
    return TokensEmitted(source=source, request_ids=[], epochs=[], first_indexes=[], counts=[], tokens=[])


def _lost(why: str) -> Failed:
    return Failed(failure=Failure(code=Code.WORKER_LOST, message=why))
