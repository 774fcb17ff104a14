"""The simulated cluster: real entrypoint, balancers, prefill and decode actors; engines and store only take time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from actors.balancers.actor import DecodeBalancer, PrefillBalancer
from actors.balancers.choice import Choice
from actors.decode.actor import Decode
from actors.prefill.actor import Prefill
from bus.bulk import Bulk
from bus.bus import Bus
from bus.files import Files
from bus.memory import MemoryBroker
from kernels.engine import EngineInfo, Tokens
from run.simulate.arrival import VOCABULARY_BITS
from run.simulate.engine import SimEngine
from run.simulate.store import SimKeeper, SimLoader, SimMetadata, Store
from run.simulate.truth import Truth
from run.simulator import World

SPREAD = 0.1
"""Replicas are up to so much faster, or slower, than they should be."""

MAX_TOKENS = 1 << 21
PREFILL_SLOTS = 64
DECODE_SLOTS = 256
CAPACITY_TOKENS = 1 << 26
"""What 60 GB hold at 890 bytes a token."""


class SimPrefill(Prefill):
    """With the simulated store."""

    def __init__(self, id: str, bus: Bus, bulk: Bulk, engine: SimEngine, files: Files, store: Store) -> None:
        super().__init__(id, bus, bulk, engine, files)
        real = self.loader
        self.keeper = SimKeeper(store)  # type: ignore[assignment]
        self.loader = SimLoader(bus, files, real._snapshots, self.spawn, self._on_loaded, self.report_load)


class _Nudge(asyncio.Event):
    """A decode actor's sign that there is something to do, which its engine sees, too."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__()
        self._engine = engine

    def set(self) -> None:
        super().set()
        self._engine.nudge()


class SimDecode(Decode):
    """With the simulated store, and an engine that takes many steps at once until something happens."""

    def __init__(self, id: str, bus: Bus, bulk: Bulk, engine: SimEngine, store: Store) -> None:
        super().__init__(id, bus, bulk, engine)
        self.keeper = SimKeeper(store)  # type: ignore[assignment]
        self._has_work = _Nudge(engine)


class Cluster(World):
    """So many replicas, each of its own speed, with one policy for prompts."""

    def __init__(self, seed: int, truth: Truth, answers: Mapping[str, tuple[int, Tokens]]) -> None:
        super().__init__(seed, MemoryBroker())
        self._truth = truth
        self._answers = answers
        self._speeds = random.Random(f"speeds {seed}")
        self.store = Store()
        self.prefill: list[SimEngine] = []
        self.decode: list[SimEngine] = []

    async def open(self, num_prefill: int, num_decode: int, choice: Choice | None) -> None:
        """Start all of it."""
        bus = await self.bus("prefill-balancer/pb0")
        await self.add(PrefillBalancer("pb0", bus) if choice is None else PrefillBalancer("pb0", bus, choice))
        await self.add(DecodeBalancer("db0", await self.bus("decode-balancer/db0")))
        await self.add(SimMetadata("m0", await self.bus("metadata/m0"), self.store))
        for number in range(num_prefill):
            id, engine = f"p{number:04}", self._engine(PREFILL_SLOTS)
            self.prefill.append(engine)
            bus, bulk = await self.bus(f"prefill/{id}"), await self.bulk(f"prefill/{id}")
            await self.add(SimPrefill(id, bus, bulk, engine, self.open_files(f"prefill/{id}"), self.store))
        for number in range(num_decode):
            id, engine = f"d{number:04}", self._engine(DECODE_SLOTS)
            self.decode.append(engine)
            await self.add(
                SimDecode(id, await self.bus(f"decode/{id}"), await self.bulk(f"decode/{id}"), engine, self.store)
            )
        await self.add_entrypoint("e0")

    def _engine(self, num_slots: int) -> SimEngine:
        info = EngineInfo(
            model="simulated",
            layout="simulated",
            vocab_size=1 + (1 << VOCABULARY_BITS),
            eos_token=1 << VOCABULARY_BITS,
            max_tokens=MAX_TOKENS,
            num_slots=num_slots,
            max_step_tokens=16384,
            capacity_tokens=CAPACITY_TOKENS,
            space="simulated",
            block_bytes=0,
        )
        speed = self._speeds.uniform(1 - SPREAD, 1 + SPREAD)
        chance = random.Random(self._speeds.getrandbits(64))
        return SimEngine(info, self._truth, self._answers, speed=speed, chance=chance)
