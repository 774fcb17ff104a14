"""Finding out what of a request's text is cached: who is asked, and what follows."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from actors.entrypoint.lookup import INLINE_TOKENS, Found, Names, Touched, can_be_named, gather, name, plan, scatter
from actors.entrypoint.peers import Peers
from actors.entrypoint.request import Request
from schemas.cache import BlocksFound, FindBlocks

T = TypeVar("T")

FRESH_S = 5.0
"""What was found is true for so long."""


class Lookups(Protocol):
    """The way to metadata shards and prefill replicas: see bus/lookup.py."""

    async def find(self, request_id: str, questions: Mapping[str, FindBlocks]) -> dict[str, BlocksFound]: ...

    async def space_of(self, replica: str) -> str | None: ...


class Seams(Protocol):
    """See bus/bus.py."""

    @property
    def clock_ns(self) -> Callable[[], int]: ...

    @property
    def run_beside(self) -> Callable[[Callable[[], T]], Awaitable[T]]: ...


class Finder:
    """One shard's. `now_s` is the clock of its actor; `wake` is called when something is to be `touched`."""

    def __init__(self, lookups: Lookups, seams: Seams, now_s: Callable[[], float], wake: Callable[[], None]) -> None:
        self.peers, self.touched = Peers(), Touched()
        self._lookups, self._seams = lookups, seams
        self._now_s, self._wake = now_s, wake

    async def describe(self, replica: str) -> None:
        """Ask a prefill replica what its space is."""
        self.peers.described(replica, await self._lookups.space_of(replica))

    async def look_up(self, request: Request) -> None:
        """Find out what of its text is cached. Whatever cannot be found out in time is not."""
        space, names, text = self.peers.space(self._now_s()), request.names, request.text
        if not space or request.end is not None or not can_be_named(text, request.num_tokens):
            return
        if names is None or names.space != space:
            work = functools.partial(name, space, request.submit, text)
            names = work() if request.num_tokens <= INLINE_TOKENS else await self._seams.run_beside(work)
        found = await self._find(request, names)
        request.was_looked_up(names, plan(names, found, request.num_bounded), self._now_s())

    async def refresh(self, request: Request) -> None:
        """The same before a replica is given the result, if that is old."""
        if request.is_plan_older(FRESH_S, self._now_s()):
            await self.look_up(request)

    async def _find(self, request: Request, names: Names) -> Found:
        """What is there of these blocks. Of a single one nothing could be restored: nobody is asked."""
        is_of_use = names.num_blocks > 1 and not request.submit.exact
        questions = scatter(names.keys, self.peers.shards(self._now_s()) if is_of_use else [])
        asked = {shard: question.message for shard, question in questions.items()}
        answers = await self._lookups.find(request.id, asked)
        if request.end is None:
            self.peers.silent(asked.keys() - answers.keys())
        found = gather(names.keys, questions, answers, self._seams.clock_ns())
        if self.touched.add(names, found):
            self._wake()
        return found
