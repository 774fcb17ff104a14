"""A request that would have to compute an image it was not given goes back to its entrypoint, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

from actors.prefill.job import Job
from actors.prefill.restore import NOTHING, Restored
from actors.rules.hit import Hit
from kernels.engine import Prefix, StateError
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.cache import CachedPrefix
from tests.actors.builders import dispatch
from tests.actors.core import VOCABULARY, info
from tests.actors.prefixes import Stand, blocks, stand, tokens

FIRST, SECOND = tokens(blocks(6) + 50), tokens(blocks(8) + 7)


def bad_block(system: Stand) -> None:
    """It turns out while it is loaded."""
    system.disk.flip(system.shelf.name, system.shelf.slab.offset(3) + 70)


def refused(system: Stand) -> None:
    """It turns out when it has a slot already: after what was told before, which is then of no interest."""

    async def refuse(key: str, prefix: Prefix) -> int:
        raise StateError("not as they should be")

    system.engine.resume = refuse  # type: ignore[method-assign]


def nothing(system: Stand) -> None:
    """It is known at once (an exact request)."""


CASES: list[tuple[Callable[[Stand], None], bool]] = [(bad_block, False), (refused, False), (nothing, True)]


async def prepared(system: Stand, damage: Callable[[Stand], None]) -> CachedPrefix:
    await system.finish("r1", FIRST, system.cached(FIRST))
    prefix = structs.replace(system.cached(SECOND), images_from=blocks(4) + 9)
    damage(system)
    return prefix


@pytest.mark.parametrize(("damage", "exact"), CASES)
def test_it_is_let_go_of_and_the_entrypoint_hears_of_it(damage: Callable[[Stand], None], exact: bool) -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await prepared(system, damage)
            system.entry.num_ignored = 1
            await system.send("r2", SECOND, prefix, exact=exact)
            await system.quiet()
            assert system.balancer.num_released == 2 and "r2" not in system.sink.taken
            *_, told, again = system.entry.shortened["r2"]
            assert told == again and told.is_returned and told.start < prefix.images_from
            computed = system.detail("computed_tokens")
            assert computed == len(FIRST)
            # It comes anew, with all its images: nothing of it is in the way.
            await system.finish("r2", SECOND, structs.replace(prefix, images_from=0), exact=exact)
            assert system.balancer.num_released == 3

    run_virtual(main())


@pytest.mark.parametrize(("damage", "exact"), CASES)
def test_cancelled_at_every_await_it_is_let_go_of_once(damage: Callable[[Stand], None], exact: bool) -> None:
    async def one(num_turns: int) -> bool:
        """Cancel after so many turns of the loop. Whether it was there to be cancelled."""
        async with stand() as system:
            prefix = await prepared(system, damage)
            await system.send("r2", SECOND, prefix, exact=exact)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            was_running = await system.cancel("r2")
            await system.quiet()
            assert system.balancer.num_released == 2
            return was_running

    num_turns = 0
    while run_virtual(one(num_turns)):
        num_turns += 1
    assert exact or num_turns >= 5


def test_it_does_not_wait_for_a_step_that_is_under_way() -> None:
    async def main() -> None:
        cost = StepCost(step_ns=1_000_000_000)
        async with stand(TimedEngine(info(max_tokens=4096), VOCABULARY, cost)) as system:
            prefix = await prepared(system, bad_block)
            await system.send("busy", FIRST[:100], None)
            await asyncio.sleep(0.1)
            await system.send("r2", SECOND, prefix)
            await asyncio.sleep(0.1)
            assert system.prefill.batch.get("busy") is not None
            assert system.prefill.batch.get("r2") is None and system.balancer.num_released == 2
            await system.quiet()

    run_virtual(main())


@pytest.mark.parametrize(
    ("restored", "is_returned"),
    [
        (Restored(Hit(4, blocks(4))), False),  # as promised
        (Restored(Hit(3, blocks(3))), False),  # less, and what was left out is still in it
        (Restored(Hit(4, blocks(3)), approximate=True), False),
        (Restored(Hit(3, blocks(2)), approximate=True), True),
        (Restored(Hit(2, blocks(2))), True),
        (NOTHING, True),
    ],
)
def test_an_image_that_ends_behind_the_start_may_not_have_been_given(restored: Restored, is_returned: bool) -> None:
    prompt = np.arange(blocks(6), dtype="<u4")
    prefix = CachedPrefix(space="s", root=bytes(16), keys=bytes(6 * 16), images_from=blocks(2) + 5)
    job = Job(structs.replace(dispatch("r1", len(prompt)), prefix=prefix), prompt, restored=Restored(Hit(4, blocks(4))))
    told = job.settle(restored, "why")
    assert job.is_returned is is_returned and (told is not None and told.is_returned) is is_returned
    job.dispatch = structs.replace(job.dispatch, prefix=structs.replace(prefix, images_from=0))
    job.settle(NOTHING, "why")
    assert not job.is_returned


def test_one_that_is_returned_is_told_of_also_when_the_entrypoint_counts_on_no_more() -> None:
    prompt = np.arange(blocks(6), dtype="<u4")
    prefix = CachedPrefix(space="s", root=bytes(16), keys=bytes(6 * 16), images_from=5)
    job = Job(structs.replace(dispatch("r1", len(prompt)), prefix=prefix), prompt)
    told = job.settle(NOTHING, "why")
    assert told is not None and told.is_returned
