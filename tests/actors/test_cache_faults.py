"""The whole cache under faults, at random: no wrong token, no leak, and the service goes on.

Conversations run while what they rely on is killed, damaged, lost and doubled. Every answer is held against that of a
system without any cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from bus.bus import Delivery
from bus.memory import MemoryWire
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.request import Failed
from tests.actors.cached import COST, Cached, ask, cached, prompt
from tests.actors.core import Core, core, quiet

NUM_CONVERSATIONS = 4
NUM_TURNS = 4


class CacheLosses(RecordingBroker):
    """Loses, doubles or holds back one in `one_in` of the messages by which the cache lives."""

    VERBS = (".stored", ".dropped", ".touched", ".failed", ".kept", ".find", ".store", ".dump", ".drop", ".room")

    def __init__(self, seed: int, one_in: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._one_in = one_in
        self.num_lost = 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if delivery.subject.endswith(self.VERBS) and self._random.randrange(self._one_in) == 0:
            match self._random.randrange(3):
                case 0:
                    self.num_lost += 1
                    return
                case 1:
                    super().publish(source, delivery)
                case 2:
                    late = super().publish
                    asyncio.get_running_loop().call_later(self._random.random() / 10, late, source, delivery)
                    return
        super().publish(source, delivery)


def turns(number: int) -> list[bytes]:
    """The prompts of one conversation: each begins with the one before; all begin alike, for two blocks."""
    prompts = [prompt(600 + 40 * number, number, after=prompt(300))]
    for turn in range(1, NUM_TURNS):
        prompts.append(prompt(len(prompts[-1]) // 4 + 150, 100 * number + turn, after=prompts[-1]))
    return prompts


async def converse(system: Core, number: int) -> list[list[int]]:
    """One conversation, turn after turn; a request whose worker was lost is sent again, as a client would."""
    answers = []
    for turn, tokens in enumerate(turns(number)):
        for attempt in range(10):
            got, end = await system.finish(ask(f"{number}.{turn}.{attempt}", tokens, max_tokens=140))
            if not isinstance(end, Failed):
                break
            assert end.failure.code in ("worker_lost", "no_replica"), end
        assert not isinstance(end, Failed)
        answers.append(got)
        await asyncio.sleep(0.3)
    return answers


@pytest.fixture(scope="module")
def truth() -> list[list[list[int]]]:
    """The answers of a system without a cache."""

    async def run() -> list[list[list[int]]]:
        async with core(2, 2, COST) as system:
            await system.with_prefill("big", COST, max_tokens=20_000)
            await system.with_decode("big", COST, max_tokens=20_000)
            for name in ("prefill/p0", "prefill/p1", "decode/d0", "decode/d1"):
                await system.actors[name].drain()
            return [await converse(system, number) for number in range(NUM_CONVERSATIONS)]

    return run_virtual(run())


async def stir(system: Cached, chance: random.Random, harm: Callable[[Cached, random.Random], Awaitable[None]]) -> None:
    """Do harm every now and then."""
    while True:
        await asyncio.sleep(chance.uniform(0.05, 0.4))
        await harm(system, chance)


async def damage_slabs(system: Cached, chance: random.Random) -> None:
    """Flip some bytes anywhere, cut a file short, lose one, or all."""
    files = system.folder.files
    if not files:
        return
    name = chance.choice(sorted(files))
    match chance.randrange(10):
        case 0:
            files.clear()
        case 1:
            del files[name]
        case 2:
            del files[name][chance.randrange(len(files[name]) + 1) :]
        case _:
            for _ in range(20):
                if files[name]:
                    files[name][chance.randrange(len(files[name]))] ^= 1 << chance.randrange(8)


async def fail_disks(system: Cached, chance: random.Random) -> None:
    """The next operations of someone fail."""
    files = system.files[chance.choice(sorted(name for name in system.files if not system.tasks[name].done()))]
    for _ in range(chance.randrange(1, 4)):
        files.fail_next(OSError(chance.choice([5, 28, 2]), "on demand"))


def killer(*roles: str) -> Callable[[Cached, random.Random], Awaitable[None]]:
    async def kill(system: Cached, chance: random.Random) -> None:
        await system.restart(chance.choice(sorted(n for n in system.actors if n.partition("/")[0] in roles)))

    return kill


async def forget_snapshots(system: Cached, chance: random.Random) -> None:
    for keeper in system.keepers():
        keeper.snapshots.clear()


HARMS = {
    "nothing": None,
    "damaged slabs": damage_slabs,
    "failing disks": fail_disks,
    "writers killed": killer("writer"),
    "metadata killed": killer("metadata"),
    "kvstore killed": killer("kvstore"),
    "workers killed": killer("prefill", "decode"),
    "anybody killed": killer("metadata", "writer", "kvstore", "prefill", "decode"),
    "snapshots lost": forget_snapshots,
}


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("one_in", [0, 4], ids=["road", "lossy road"])
@pytest.mark.parametrize("harm", list(HARMS))
def test_tokens_are_those_of_a_system_without_a_cache(
    harm: str, one_in: int, seed: int, truth: list[list[list[int]]]
) -> None:
    async def run() -> None:
        broker = CacheLosses(seed, one_in) if one_in else RecordingBroker()
        async with cached(broker=broker, seed=seed) as system:
            work, chance = HARMS[harm], random.Random(seed)
            stirring = [asyncio.create_task(stir(system, chance, work))] if work is not None else []
            answers = await asyncio.gather(*(converse(system, number) for number in range(NUM_CONVERSATIONS)))
            for task in stirring:
                task.cancel()
            await asyncio.gather(*stirring, return_exceptions=True)
            await system.revive()
            for files in system.files.values():
                files.heal()
            assert answers == truth
            await system.settle(30.0)
            assert await quiet(system) == {}
            # And it works as if nothing had been, when damage is found out: what is computed now is found next.
            fresh = prompt(900, 77)
            cold = await system.run(ask("last.0", fresh))
            for attempt in range(1, 4):
                await system.settle(30.0)
                assert await system.run(ask(f"last.{attempt}", fresh)) == cold
            if not one_in:
                assert system.listener.cached["last.3"] >= 640

    run_virtual(run())
