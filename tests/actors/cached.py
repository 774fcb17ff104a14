"""A whole small system with its KV cache on the memory bus: two of each, one folder of slabs, timed engines.

A timed engine's tokens depend on every token, block and window that its state was made of, so what is asserted of
tokens holds what was restored to account.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from actors.decode.actor import Decode
from actors.prefill.actor import Prefill
from actors.rules.slab import Slab
from bus.memory_files import MemoryFolder
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from schemas.bulk import Payload
from schemas.request import Submit
from tests.actors.builders import submit
from tests.actors.core import Core, Listener

COST = StepCost(step_ns=2_000_000, prefill_token_ns=10_000)
SLOTS_PER_SLAB = 64
SLAB_BYTES = Slab(64, SLOTS_PER_SLAB, bytes(16), 0).file_bytes
SETTLE_S = 10.0
"""Of virtual time: events are heard, gaps repaired, members known or forgotten."""


def prompt(num_tokens: int, seed: int = 0, *, after: bytes = b"") -> bytes:
    """Tokens by chance, behind those of `after`."""
    draw = np.random.default_rng(seed).integers(100, 900, num_tokens - len(after) // 4)
    return after + draw.astype("<u4").tobytes()


def ask(request_id: str, tokens: bytes, max_tokens: int = 8, **fields: Any) -> Submit:
    return submit(
        request_id,
        prompt=Payload(inline=tokens),
        num_prompt_tokens=len(tokens) // 4,
        max_tokens=max_tokens,
        **fields,
    )


class Cached(Core):
    """What a test does with it."""

    async def run(self, submit: Submit) -> list[int]:
        """The tokens of a request, which has to finish."""
        tokens, end = await self.finish(submit)
        assert type(end).__name__ == "Finished", end
        return tokens

    async def settle(self, seconds: float = SETTLE_S) -> None:
        """Let time pass, in which nothing is asked for."""
        await asyncio.sleep(seconds)

    def total(self, name: str) -> int:
        """Of all prefill replicas together, since their start."""
        return int(sum(a.load().detail[name] for a in self.actors.values() if isinstance(a, Prefill)))

    def of(self, kind: type[Any]) -> list[Any]:
        """The actors of a kind that live."""
        return [actor for name, actor in self.actors.items() if isinstance(actor, kind) and not self.tasks[name].done()]

    async def restart(self, name: str) -> None:
        """Kill an actor, and start it anew a little later."""
        self.kill(name)
        await asyncio.sleep(0.5)
        role, _, id = name.partition("/")
        match role:
            case "metadata":
                await self.add_metadata(id)
            case "writer":
                await self.add_writer(id, SLAB_BYTES)
            case "kvstore":
                await self.add_kvstore(id, self.budget_bytes)
            case "prefill":
                await self.with_prefill(id, COST, max_tokens=20_000)
            case "decode":
                await self.with_decode(id, COST, max_tokens=20_000)
            case _:
                raise ValueError(name)

    async def revive(self) -> None:
        """Start anew what is dead."""
        for name in [name for name, task in self.tasks.items() if task.done()]:
            await self.restart(name)

    def keepers(self) -> list[Any]:
        """What holds snapshots, of all that live."""
        return [actor.keeper for actor in self.of(Prefill) + self.of(Decode)]

    budget_bytes = 1 << 20

    def held(self) -> dict[str, int]:
        """As for a system without a cache; snapshots are on offer on purpose."""
        held = super().held()
        for name, actor in self.actors.items():
            if isinstance(actor, Prefill | Decode) and not self.tasks[name].done():
                held[f"bulk of {name}"] -= len(actor.keeper.snapshots)
        return held


@asynccontextmanager
async def cached(
    *, folder: MemoryFolder | None = None, broker: RecordingBroker | None = None, num_metadata: int = 2, seed: int = 0
) -> AsyncIterator[Cached]:
    """A running system; whatever a test does in it, no rule of the token stream may have been broken."""
    system = Cached(seed, broker)
    if folder is not None:
        system.folder = folder
    try:
        await system.add(Listener("rc0", await system.bus("recipe/rc0")))
        await system.add_balancers()
        await system.add_kvstore("k0", system.budget_bytes)
        for index in range(num_metadata):
            await system.add_metadata(f"m{index}")
        for index in range(2):
            await system.add_writer(f"w{index}", SLAB_BYTES)
        for index in range(2):
            await system.with_prefill(f"p{index}", COST, max_tokens=20_000)
            await system.with_decode(f"d{index}", COST, max_tokens=20_000)
        await system.add_entrypoint("e0")
        await system.settle()
        yield system
        assert system.listener.wrongs == []
    finally:
        await system.stop()


