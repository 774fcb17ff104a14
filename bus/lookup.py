"""Asking for cached prefixes: what blocks are, and of many metadata shards at once which of them exist."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bus.bus import Bus, BusError
from bus.subjects import DESCRIBE, FIND
from schemas.cache import BlocksFound, DescribeSpace, FindBlocks

LOOKUP_S = 1.0
"""How long a shard may take. Computing what it may know of takes longer only for long prompts."""

DESCRIBE_S = 2.0


class Lookups:
    """Look-ups on behalf of requests, each of which may end meanwhile."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._over: dict[str, asyncio.Future[None]] = {}

    async def find(self, request_id: str, questions: Mapping[str, FindBlocks]) -> dict[str, BlocksFound]:
        """The answers of these shards, all asked at once. Who did not answer within LOOKUP_S is not among them.

        Returns early, with nothing, when the request is over.
        """
        if not questions:
            return {}
        over = self._over[request_id] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(self._find_all(questions))
        try:
            await asyncio.wait([asking, over], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return {}
            return asking.result()
        finally:
            asking.cancel()
            if self._over.get(request_id) is over:
                del self._over[request_id]

    def give_up(self, request_id: str) -> None:
        """The request is over: nobody waits for answers any more. Idempotent."""
        over = self._over.pop(request_id, None)
        if over is not None:
            over.set_result(None)

    async def space_of(self, replica: str) -> str | None:
        """What the blocks of a prefill replica are; None without an answer."""
        try:
            return (await self._bus.ask(DESCRIBE.at(replica), DescribeSpace(), timeout_s=DESCRIBE_S)).space
        except BusError:
            return None

    async def _find_all(self, questions: Mapping[str, FindBlocks]) -> dict[str, BlocksFound]:
        answers = await asyncio.gather(*(self._find(shard, question) for shard, question in questions.items()))
        return {shard: answer for shard, answer in zip(questions, answers, strict=True) if answer is not None}

    async def _find(self, shard: str, question: FindBlocks) -> BlocksFound | None:
        try:
            return await self._bus.ask(FIND.at(shard), question, timeout_s=LOOKUP_S)
        except BusError:
            return None
