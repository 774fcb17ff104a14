"""The engine that computes, in a whole system: cold, hit, hit on another replica, and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.metadata.actor import Metadata
from actors.prefill.actor import Prefill
from actors.writer.actor import Writer
from bus.files import PosixFiles
from kernels.local import LocalEngine
from schemas.request import Sampling
from tests.actors.cached import Cached, ask
from tests.actors.core import Listener, quiet
from tests.actors.preempting import preempt_at
from tests.untrained import untrained

GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)
SEEDED = Sampling(temperature=1.0, top_p=0.95, seed=3)


class Real(Cached):
    """Local engines over a folder on disk, on a real clock."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self._folder = folder

    def open_files(self, name: str) -> Any:
        return PosixFiles(self._folder)

    async def setup(self, prefill: Sequence[str] = ("p0", "p1")) -> None:
        await self.add(Listener("rc0", await self.bus("recipe/rc0")))
        await self.add_balancers()
        await self.add_kvstore("k0", 1 << 26)
        await self.add_metadata("m0")
        await self.add_writer("w0", 1 << 22)
        for name in prefill:
            await self.add_prefill(name, _engine())  # type: ignore[arg-type]
        await self.add_decode("d0", _engine())  # type: ignore[arg-type]
        await self.add_entrypoint("e0")

    async def settle(self, seconds: float = 30.0) -> None:
        """Until all that was computed is stored, and found."""

        def is_settled() -> bool:
            (writer,), (shard,) = self.of(Writer), self.of(Metadata)
            stored = self.total("stored_blocks") + self.actors["decode/d0"].load().detail["stored_blocks"]
            blocks = writer.load().detail["blocks"]
            return bool(stored >= self.num_expected and blocks == shard.load().detail["blocks"])

        async with asyncio.timeout(seconds):
            while not is_settled():
                await asyncio.sleep(0.01)

    num_expected = 0


def _engine() -> LocalEngine:
    return LocalEngine(untrained(), num_slots=4, max_step_tokens=512)


def test_one_that_made_way_goes_on_as_it_would_have_or_is_known_to_be_approximate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(4).integers(3, 1000, 300).astype("<u4").tobytes()

    async def main() -> None:
        system = Real(tmp_path)
        try:
            await system.setup(["p0"])

            async def run(name: str, sampling: Sampling, **fields: Any) -> tuple[list[int], bool]:
                made = await system.run(ask(name, tokens, max_tokens=12, sampling=sampling, **fields))
                request = system.entrypoint.shard.get(name)
                assert request is not None and request.num_rebuilt == (name in again)
                return made, request.is_approximate

            again = ["again", "exact again", "replay again"]
            whole, _ = await run("whole", SEEDED, cache="other")
            exact, _ = await run("exact", SEEDED, exact=True)
            preempt_at(monkeypatch, again, 5)
            assert await run("again", SEEDED) == (whole, False)
            assert system.total("restored_tokens") > 0 and system.total("replayed_tokens") == 0
            assert await run("exact again", SEEDED, exact=True) == (exact, False)
            for module in ("actors.rules.hit", "actors.entrypoint.request"):
                monkeypatch.setattr(f"{module}.EXACT_OUTPUT", 0)
            made, is_approximate = await run("replay again", SEEDED)
            assert made[:5] == whole[:5] and len(made) == 12 and is_approximate
        finally:
            await system.stop()

    asyncio.run(main())


def test_cold_hit_and_hit_on_another_replica_give_the_same_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(3, 1000, 700).astype("<u4").tobytes()
    longer = tokens + np.random.default_rng(2).integers(3, 1000, 200).astype("<u4").tobytes()

    async def main() -> None:
        system = Real(tmp_path)
        try:
            await system.setup()

            async def run(name: str, prompt: bytes, sampling: Sampling, **fields: Any) -> list[int]:
                return await system.run(ask(name, prompt, max_tokens=24, sampling=sampling, **fields))

            cold = {s: await run(f"cold {s.seed}", longer, s, cache=f"of {s.seed}") for s in (GREEDY, SEEDED)}
            await run("first", tokens, GREEDY)
            system.num_expected = 2 * 7 + 5
            await system.settle()
            maker, other = sorted(system.of(Prefill), key=lambda actor: -actor.load().detail["computed_tokens"])
            for sampling in (GREEDY, SEEDED):
                assert await run(f"hit {sampling.seed}", longer, sampling) == cold[sampling]
                assert system.listener.cached[f"hit {sampling.seed}"] >= 640
            await maker.drain()
            for sampling in (GREEDY, SEEDED):
                name = f"other {sampling.seed}"
                assert await run(name, longer, sampling) == cold[sampling]
                assert system.listener.cached[name] >= 640
            assert other.load().detail["restored_tokens"] >= 2 * 640 and other.load().detail["snapshot_bytes"] > 0
            assert system.total("replayed_tokens") == 0
            for keeper in system.keepers():
                keeper.snapshots.clear()
            replayed = await run("replayed", longer, GREEDY)
            assert system.total("replayed_tokens") == 128 and replayed
            request = system.entrypoint.shard.get("replayed")
            assert request is not None and request.is_approximate
            for keeper in system.keepers():
                keeper.close()
            assert await quiet(system, 10.0) == {}
        finally:
            await system.stop()

    asyncio.run(main())
