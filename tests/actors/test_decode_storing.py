"""A decode replica stores what fills up, keeps windows at the end, and generates as if it did neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from actors.decode.actor import Decode
from actors.rules.chain import BLOCK_TOKENS, chain, root
from actors.rules.ring import Ring
from bus.bus import Delivery, decoder
from bus.snapshots import SNAPSHOT_S, Snapshots
from bus.subjects import CANCEL_DECODE, CLAIM, HAND_OVER, TOKENS
from kernels.engine import Chunk, EngineInfo, Sampling
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.cache import ChainEnd, Snapshot
from schemas.failure import Code, Failure
from schemas.handover import Claimed, HandedOver
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, Cancelled, End, Failed, Finished, FinishReason, Limits, Taken, TokensEmitted
from schemas.request import Sampling as Asked
from tests.actors.builders import hand_over
from tests.actors.core import VOCABULARY, info
from tests.bus.members import FakeShard, FakeWriter, Place, load, place

ROOT = root("timed")
COST = StepCost(step_ns=1_000_000)
LENGTH = Finished(reason=FinishReason.LENGTH)
STOP = Finished(reason=FinishReason.STOP)


class Stage:
    """A decode replica, a writer, a metadata shard, and one who hands requests over and takes their tokens."""

    def __init__(self, here: Place, decode: Decode, engine: TimedEngine) -> None:
        self.here = here
        self.decode = decode
        self.engine = engine
        self.writer = FakeWriter(here, "w0")
        self.shard = FakeShard(here, "m0")
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, End] = {}
        self.over_s: dict[str, float] = {}

    async def start(self) -> None:
        self.bus, self.bulk = await self.here.bus(), await self.here.bulk()
        self.reader = Snapshots(self.bus, self.bulk, "test", Ring())
        await self.bus.wire.subscribe(CLAIM.at("e0").name, self._on_claim)
        await self.bus.wire.subscribe(TOKENS.at("e0").name, self._on_tokens)
        await self.writer.start()
        await self.shard.start()
        ready = asyncio.Event()
        self.running = self.here.spawn(self.decode.run(ready.set))
        await ready.wait()
        await self.beat()

    async def beat(self) -> None:
        keeper = self.decode.keeper
        keeper._store.on_load(load(Role.WRITER, "w0"))
        await keeper.snapshots.on_load(self.shard.report())

    def _on_claim(self, delivery: Delivery) -> None:
        self.here.spawn(self.bus.answer(delivery.reply, Claimed(epoch=2)))

    def _on_tokens(self, delivery: Delivery) -> None:
        emitted, start = decoder(TokensEmitted).decode(delivery.body), 0
        for id, first, count in zip(emitted.request_ids, emitted.first_indexes, emitted.counts, strict=True):
            assert first == len(self.tokens.setdefault(id, []))
            self.tokens[id] += emitted.tokens[start : start + count]
            start += count
        for number, end in emitted.ends:
            self.ends[emitted.request_ids[number]] = end
            self.over_s[emitted.request_ids[number]] = asyncio.get_running_loop().time()
        self.here.spawn(self.bus.answer(delivery.reply, Taken()))

    async def begin(self, id: str, num_prompt: int, max_tokens: int, **chained: Any) -> None:
        """Compute a prompt, and hand it over; its chain, unless `chained` says otherwise."""
        prompt, sampling = prompt_of(id, num_prompt), Sampling(1.0, 1.0, 7)
        source = TimedEngine(self.engine.info, VOCABULARY)
        source.admit(id, num_prompt + 1, sampling)
        await source.prefill([Chunk(id, prompt)])
        state = await source.export(id)
        keys = [ROOT, *chain(ROOT, prompt)]
        tail = prompt[num_prompt // BLOCK_TOKENS * BLOCK_TOKENS :].astype("<u4").tobytes()
        end = ChainEnd(**{"space": "timed", "key": keys[-1], "tokens": tail, **chained})
        offer = structs.replace(
            hand_over(id, num_prompt, max_tokens),
            state=self.bulk.offer(state, lease_s=60),
            sampling=Asked(temperature=1.0, top_p=1.0, seed=7),
            limits=Limits(max_tokens=max_tokens),
            chain=None if chained.get("space") == "" else end,
        )
        assert await self.bus.ask(HAND_OVER.at("d0"), offer, timeout_s=5) == HandedOver()

    async def end(self, *ids: str) -> None:
        """All of these have ended, and are freed; what was under way has arrived."""
        while not all(id in self.ends for id in ids) or len(self.engine._requests) or len(self.decode.slots):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    async def text(self, id: str, num_prompt: int) -> tuple[dict[bytes, tuple[bytes, bytes]], dict[bytes, bytes]]:
        """What a prefill of the whole text that is computed of a request stores and keeps of what decode added:
        key -> (parent, payload), key -> windows."""
        tokens = np.concatenate([prompt_of(id, num_prompt), np.array(self.tokens[id], dtype=np.uint32)])
        engine = TimedEngine(self.engine.info, VOCABULARY)
        engine.admit(id, len(tokens), Sampling(1.0, 1.0, 7))
        blocks: dict[bytes, tuple[bytes, bytes]] = {}
        windows: dict[bytes, bytes] = {}
        keys, first = [ROOT, *chain(ROOT, tokens)], num_prompt // BLOCK_TOKENS
        for number in range(len(keys) - 1):
            await engine.prefill([Chunk(id, tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])])
            (payload,) = await engine.blocks(id, number, 1)
            at_end = await engine.windows(id, (number + 1) * BLOCK_TOKENS)
            assert at_end is not None
            if number >= first:
                blocks[keys[number + 1]] = keys[number], payload
                windows[keys[number + 1]] = at_end
        return blocks, windows

    async def pulled(self) -> dict[bytes, bytes | None]:
        return {key: await self.reader.pull(snapshot) for key, snapshot in self.shard.known.items()}

    @property
    def stored(self) -> dict[bytes, tuple[bytes, bytes]]:
        return {key: (parent, payload) for key, (parent, payload, _) in self.writer.blocks.items()}

    @property
    def detail(self) -> dict[str, float]:
        return self.decode.load().detail


def prompt_of(id: str, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(list(id.encode())).integers(100, 1000, num_tokens).astype(np.uint32)


def engine_of(engine_info: EngineInfo, mean_output: int = 0) -> TimedEngine:
    return TimedEngine(engine_info, VOCABULARY, COST, mean_output, most_accepted=5)


@asynccontextmanager
async def stage(engine: TimedEngine | None = None) -> AsyncIterator[Stage]:
    async with place() as here:
        engine = engine or engine_of(info())
        bulk = await here.bulk()
        system = Stage(here, Decode("d0", await here.bus(), bulk, engine), engine)
        await system.start()
        yield system
        assert not system.running.done()
        assert bulk.num_offers == len(system.decode.keeper.snapshots)
        await asyncio.sleep(SNAPSHOT_S)
        keeper = system.decode.keeper
        assert (bulk.num_offers, len(keeper.snapshots), keeper.snapshots.num_bytes) == (0, 0, 0)
        assert keeper._store.num_bytes == 0 and not keeper._store._requests and system.bulk.num_offers == 0


@pytest.mark.parametrize("num_prompt", [5, 127, 128, 129, 300])
def test_what_decode_stores_is_what_prefill_would(num_prompt: int) -> None:
    async def main() -> None:
        async with stage() as system:
            for id, max_tokens in (("a", 400), ("b", 20), ("c", 257), ("d", 513)):
                await system.begin(id, num_prompt, max_tokens)
            await system.end("a", "b", "c", "d")
            assert set(system.ends.values()) == {LENGTH}
            blocks: dict[bytes, tuple[bytes, bytes]] = {}
            windows: dict[bytes, bytes] = {}
            for id in system.ends:
                text = await system.text(id, num_prompt)
                # What was sampled last was not computed; it may be all that a block lacks.
                num = (num_prompt + len(system.tokens[id])) // BLOCK_TOKENS - num_prompt // BLOCK_TOKENS
                if (num_prompt + len(system.tokens[id])) % BLOCK_TOKENS == 0:
                    num -= list(text[0])[-1] not in system.stored
                blocks |= dict(list(text[0].items())[:num])
                windows |= dict(list(text[1].items())[max(num - 2, 0) : num])
            assert system.stored == blocks and await system.pulled() == windows
            assert {flag for _, _, flag in system.writer.blocks.values()} == {False}
            assert not any(snapshot.approximate for snapshot in system.shard.known.values())
            detail = {"stored_blocks": len(blocks), "lost_blocks": 0, "snapshots": len(windows)}
            assert detail.items() <= system.detail.items() and len(blocks) >= 8

    run_virtual(main())


def test_a_chain_that_is_approximate_stays_so() -> None:
    async def main() -> None:
        async with stage() as system:
            await system.begin("a", 100, 300, approximate=True)
            await system.end("a")
            assert [flag for _, _, flag in system.writer.blocks.values()] == [True] * 3
            assert [snapshot.approximate for snapshot in system.shard.known.values()] == [True] * 2

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_an_end_of_sequence_ends_the_blocks(seed: int) -> None:
    async def main() -> None:
        async with stage(engine_of(info(), mean_output=150)) as system:
            await system.begin(f"r{seed}", 100, 800)
            await system.end(f"r{seed}")
            blocks, windows = await system.text(f"r{seed}", 100)
            assert system.ends[f"r{seed}"] == STOP and system.stored == blocks
            assert await system.pulled() == dict(list(windows.items())[-2:])

    run_virtual(main())


@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.0305, 0.06, 0.1, 0.15])
def test_a_cancel_keeps_what_there_is_and_frees_at_once(wait_s: float) -> None:
    async def main() -> None:
        async with stage() as system:
            await system.begin("a", 100, 800)
            await asyncio.sleep(wait_s)
            cancelled_s = asyncio.get_running_loop().time()
            acknowledged = await system.bus.ask(CANCEL_DECODE.at("d0"), Cancel(request_id="a"), timeout_s=5)
            assert acknowledged.was_running
            while len(system.decode.slots):
                await asyncio.sleep(0.0005)
            assert asyncio.get_running_loop().time() - cancelled_s < 3 * COST.step_ns / 1e9
            assert len(system.engine._requests) == 0
            await asyncio.sleep(0.1)
            blocks, windows = await system.text("a", 100) if "a" in system.tokens else ({}, {})
            assert system.stored == blocks and len(blocks) == (100 + len(system.tokens.get("a", []))) // BLOCK_TOKENS
            assert await system.pulled() == dict(list(windows.items())[-2:])

    run_virtual(main())


@pytest.mark.parametrize("chained", [{"space": ""}, {"space": "another"}, {"tokens": b"1234"}])
def test_what_cannot_be_named_is_not_stored(chained: dict[str, Any]) -> None:
    async def main() -> None:
        async with stage() as system:
            await system.begin("a", 100, 300, **chained)
            await system.end("a")
            assert len(system.tokens["a"]) == 300
            assert system.stored == {} and system.shard.heard == [] and system.detail["lost_blocks"] == 0

    run_virtual(main())


async def _generated(trouble: str) -> tuple[list[int], float]:
    """The tokens of a request, and when it ended; all is well with it whatever the trouble."""
    async with stage() as system:
        keeper, writer = system.decode.keeper, system.writer
        if trouble == "silent":
            writer.is_silent = True
        elif trouble == "dead":
            writer.end()
        elif trouble == "refuses":
            writer.failure = Failure(code=Code.OVERLOADED, message="full")
        elif trouble == "full queue":
            writer.is_silent, keeper._store._max_bytes = True, 100
        elif trouble == "no writer":
            keeper._store.on_exited(ProcessExited(name="n", pid=1, members=["writer/w0"]))
        await system.begin("a", 100, 800, **({"space": ""} if trouble == "no chain" else {}))
        if trouble == "dies":
            await asyncio.sleep(0.1)
            writer.end()
            keeper._store.on_exited(ProcessExited(name="n", pid=1, members=["writer/w0"]))
        await system.end("a")
        assert system.ends["a"] == LENGTH
        num_stored, num_lost = system.detail["stored_blocks"], system.detail["lost_blocks"]
        if trouble in ("no chain", ""):
            assert num_lost == 0
        elif trouble == "silent":
            assert keeper._store.num_bytes > 0  # the end did not wait for it
            await asyncio.sleep(20)
            assert system.detail["lost_blocks"] == 7
        else:
            assert num_lost > 0 and system.detail["snapshots"] == 0  # windows without their block are of no use
            assert num_stored + num_lost <= 7 and (num_stored > 0) == (trouble == "dies")
        # The next one is stored as if nothing had been.
        if trouble != "no chain":
            writer.is_silent, writer.failure, keeper._store._max_bytes = False, None, 1 << 20
            if trouble in ("dead", "dies"):
                await writer.start()
            await system.beat()
            await system.begin("z", 100, 300)
            await system.end("z")
            assert set((await system.text("z", 100))[0]) <= set(system.stored)
        return system.tokens["a"], system.over_s["a"]


def test_no_trouble_with_storing_changes_a_token_or_delays_one() -> None:
    expected = run_virtual(_generated("no chain"))
    assert len(expected[0]) == 800
    for trouble in ("", "silent", "dead", "refuses", "full queue", "no writer", "dies"):
        tokens, over_s = run_virtual(_generated(trouble))
        assert tokens == expected[0] and over_s == pytest.approx(expected[1], abs=1e-6), trouble


def test_nothing_is_stored_of_a_step_that_failed_and_nothing_kept_of_its_requests() -> None:
    class Failing(TimedEngine):
        num_left = 60

        async def decode(self, keys: Sequence[str]) -> list[list[int]]:
            new = await super().decode(keys)
            self.num_left -= 1
            if self.num_left == 0:
                raise ValueError("no numbers")
            return new

        async def windows(self, key: str, num_tokens: int) -> bytes | None:
            assert self.num_left < 0
            return await super().windows(key, num_tokens)

    async def main() -> None:
        engine = Failing(info(), VOCABULARY, COST, most_accepted=5)
        async with stage(engine) as system:
            await system.begin("a", 100, 800)
            await system.end("a")
            assert isinstance(system.ends["a"], Failed)
            assert system.stored == (await system.text("a", 100))[0] and len(system.stored) >= 1
            assert system.shard.heard == [] and system.detail["snapshots"] == 0

    run_virtual(main())


def test_blocks_that_cannot_be_read_cost_the_blocks_only() -> None:
    class Unreadable(TimedEngine):
        async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
            raise ValueError("overflowed")

    async def main() -> None:
        async with stage(Unreadable(info(), VOCABULARY, COST, most_accepted=5)) as system:
            await system.begin("a", 100, 300)
            await system.end("a")
            assert system.ends["a"] == LENGTH and system.stored == {} and system.shard.heard == []

    run_virtual(main())


def test_snapshots_are_those_of_the_end_also_when_the_request_ends_elsewhere() -> None:
    """A stop sequence is a cancel; the windows are kept while the state is there, before the slot is free."""

    class Watched(TimedEngine):
        calls: list[str] = []

        async def windows(self, key: str, num_tokens: int) -> bytes | None:
            self.calls.append(f"windows {num_tokens}")
            return await super().windows(key, num_tokens)

        def free(self, key: str) -> None:
            self.calls.append("free")
            super().free(key)

    async def main() -> None:
        engine = Watched(info(), VOCABULARY, COST, most_accepted=5)
        async with stage(engine) as system:
            await system.begin("a", 200, 800)
            await asyncio.sleep(0.13)
            assert engine.calls == []  # nothing is copied while it runs
            await system.bus.ask(CANCEL_DECODE.at("d0"), Cancel(request_id="a"), timeout_s=5)
            await asyncio.sleep(0.1)
            last = (200 + len(system.tokens["a"])) // BLOCK_TOKENS * BLOCK_TOKENS
            assert last > 2 * BLOCK_TOKENS
            assert engine.calls == [f"windows {last}", f"windows {last - BLOCK_TOKENS}", "free"]
            assert "a" not in system.ends or system.ends["a"] == Cancelled()
            known: list[Snapshot] = list(system.shard.known.values())
            assert [snapshot.holder for snapshot in known] == ["decode/d0"] * 2

    run_virtual(main())
