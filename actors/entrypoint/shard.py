"""All requests of one entrypoint shard: look-ups, what is silent for too long, what may be forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from actors.entrypoint.owner import Owner
from actors.entrypoint.request import MAX_LOSSES, Request, Verdict
from actors.rules.emission import Held, resend_answer
from actors.rules.logprobs import cut
from schemas.request import End, LastWord, Resend, Submit, TokenLogprobs, TokensEmitted

RETENTION_S = 30.0
"""How long an ended request can still be asked for (the recipe may have missed the end)."""

SILENCE_S = 2.0
"""An owner that says nothing of a request for so long is asked."""


class News(NamedTuple):
    """What is new of a request: tokens from an index on, maybe its end, and their logprobs if it asked."""

    request: Request
    first_index: int
    tokens: list[int]
    end: End | None
    logprobs: TokenLogprobs | None = None


class Heard(NamedTuple):
    """What became of a message: its news, requests of which something is missing before, (request id, epoch) that its
    sender should let go of, requests that it gave back, for somebody to place, and those that it does not have."""

    news: list[News]
    gaps: list[Request]
    strays: list[tuple[str, int]]
    given_back: list[Request]
    lost: list[Request]


class Shard:
    """Owner of its requests, live and lately ended. Times are seconds of the caller's clock.

    `first_epoch` must differ between incarnations of a shard, so that what an earlier one began stays void.
    """

    def __init__(self, id: str, first_epoch: int = 1) -> None:
        self.id = id
        self.num_live = self._num_rebuilt = self._num_lost = self._num_approximate = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._requests: dict[str, Request] = {}
        self._epochs = itertools.count(first_epoch)
        self._strays: dict[tuple[str, str], float] = {}

    def holds(self, submit: Submit) -> bool:
        """It is live, by this very message: the answer to an earlier one was lost."""
        known = self._requests.get(submit.request_id)
        return known is not None and known.end is None and known.submit == submit

    def submit(self, submit: Submit, now_s: float) -> Request | None:
        """A new request; None if one with its id is live."""
        known = self._requests.get(submit.request_id)
        if known is not None and known.end is None:
            return None
        request = Request(submit, self._epochs, heard_s=now_s)
        self._requests[request.id] = request
        self.num_live += 1
        return request

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def live(self) -> Iterator[Request]:
        """Requests that have not ended. Do not end any while iterating."""
        return (request for request in self._requests.values() if request.end is None)

    def finish(self, request: Request, end: End, now_s: float) -> bool:
        """End a request; False if it has ended before."""
        is_first = request.finish(end, now_s)
        if is_first:
            self._ended(request)
        return is_first

    def _ended(self, request: Request) -> None:
        self.num_live -= 1
        self._num_approximate += request.is_approximate

    def silent(self, now_s: float) -> dict[Owner, list[Request]]:
        """Live requests with an owner that was not heard of for SILENCE_S, by owner."""
        by_owner: dict[Owner, list[Request]] = {}
        for request in self.live():
            if request.owner is None or request.is_dispatching:
                continue
            if now_s - request.heard_s > SILENCE_S:
                by_owner.setdefault(request.owner, []).append(request)
        return by_owner

    def overdue(self, now_ns: int) -> list[Request]:
        """Live requests past their deadline (unix time)."""
        return [r for r in self.live() if r.is_overdue(now_ns)]

    def forget_old(self, now_s: float) -> None:
        """Drop what ended more than RETENTION_S ago."""
        old = [id for id, r in self._requests.items() if r.end is not None and now_s - r.ended_s > RETENTION_S]
        for id in old:
            del self._requests[id]
        self._strays = {key: at_s for key, at_s in self._strays.items() if now_s - at_s < SILENCE_S}

    def hear(self, emitted: TokensEmitted, now_s: float) -> Heard:
        """Take the tokens of many requests, each by `accept`; in order."""
        ends, said, start, heard = dict(emitted.ends), dict(emitted.logprobs), 0, Heard([], [], [], [], [])
        for i, request_id in enumerate(emitted.request_ids):
            stop = start + emitted.counts[i]
            tokens, start = emitted.tokens[start:stop], stop
            request = self._requests.get(request_id)
            epoch, end = emitted.epochs[i], ends.get(i)
            if request is None or request.epoch != epoch or request.end is not None:
                # Without an epoch it waits for the answer to its claim, which may be this one's.
                if epoch and end is None and self.is_new_stray(emitted.source, request_id, now_s):
                    heard.strays.append((request_id, epoch))
                continue
            known, first = len(request.tokens), emitted.first_indexes[i]
            verdict = self.accept(request, epoch, first, tokens, end, now_s)
            is_last = verdict in (Verdict.GIVEN_BACK, Verdict.LOST)
            if verdict is Verdict.NEWS or (is_last and len(request.tokens) > known):
                logprobs = said.get(i)
                if logprobs is not None and request.logprobs is not None:
                    logprobs = cut(logprobs, known - first, len(tokens))
                    request.logprobs.add(known, logprobs)
                heard.news.append(News(request, known, request.tokens[known:], request.end, logprobs))
            if verdict is Verdict.GAP:
                heard.gaps.append(request)
            elif verdict is Verdict.GIVEN_BACK and self.rebuild(request):
                heard.given_back.append(request)
            elif verdict is Verdict.LOST:
                heard.lost.append(request)
        return heard

    def rebuild(self, request: Request) -> bool:
        """Its owner has it no more; see `Request.rebuild`."""
        self._num_rebuilt += 1
        return request.rebuild()

    def lose(self, request: Request) -> bool:
        """Its owner was lost with all that it held. False if that was once too often: then the request is to end."""
        self._num_lost += 1
        request.num_lost += 1
        return request.num_lost < MAX_LOSSES

    def accept(
        self, request: Request, epoch: int, first_index: int, tokens: Sequence[int], end: LastWord | None, now_s: float
    ) -> Verdict:
        """Tokens for a request; see `Request.accept`."""
        was_live, has_begun = request.end is None, bool(request.tokens)
        verdict = request.accept(epoch, first_index, tokens, end, now_s)
        if was_live and request.end is not None:
            self._ended(request)
        if request.tokens and not has_begun:
            self._num_prompt_tokens += request.submit.num_prompt_tokens
            self._num_cached_tokens += request.num_cached(0)
        return verdict

    def detail(self) -> dict[str, float]:
        """Totals since its start: of requests whose first tokens came, their prompts, and what was not computed; how
        often one was rebuilt, and how often lost; how many ended that a replay had part in (design §5)."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": self._num_cached_tokens,
            "rebuilt": self._num_rebuilt,
            "lost": self._num_lost,
            "approximate": self._num_approximate,
        }

    def is_new_stray(self, source: str, request_id: str, now_s: float) -> bool:
        """Tokens came from one who does not hold the request (any more): should it be told? Once in SILENCE_S."""
        if now_s - self._strays.get((source, request_id), -SILENCE_S) < SILENCE_S:
            return False
        self._strays[(source, request_id)] = now_s
        return True

    def missed(self, requests: Sequence[Request]) -> Resend:
        """The question to their owner about what was missed of these requests."""
        return Resend(
            request_ids=[request.id for request in requests],
            first_indexes=[len(request.tokens) for request in requests],
            epochs=[request.epoch for request in requests],
        )

    def resend(self, resend: Resend) -> TokensEmitted:
        """What a recipe missed."""

        def find(request_id: str) -> Held | None:
            request = self._requests.get(request_id)
            return None if request is None else Held(request.epoch, request.tokens, request.end, request.logprobs)

        answer = resend_answer(f"entrypoint/{self.id}", resend, find)
        cached = [
            (i, num_cached)
            for i, (request_id, first) in enumerate(zip(answer.request_ids, answer.first_indexes, strict=True))
            if (request := self._requests.get(request_id)) and (num_cached := request.num_cached(first))
        ]
        return structs.replace(answer, cached=cached)
