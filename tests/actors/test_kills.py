"""Each of those below the recipe is killed amid streams, and comes back: all end as they would have, nothing is left.

Of the others: test_recipe_faults.py (a shard), test_recipe_actor.py (a gateway), test_gateway_trouble.py (a recipe),
test_image_faults.py (vision), test_quota_actor.py (quota).
"""

from __future__ import annotations

import asyncio
from array import array

import pytest
from msgspec import structs

from bus.subjects import EXITED, SUBMIT
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.liveness import ProcessExited
from schemas.request import Finished, FinishReason, Submit
from tests.actors.cached import Cached, ask, cached, prompt
from tests.actors.core import core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
NUM = 4
BOUND_S = 60.0
FRONT = (
    *("prefill-balancer/pb0", "decode-balancer/db0", "metadata/m0", "kvstore/k0", "writer/w0"),
    "entrypoint/e0",
)
WORKERS = ("prefill/p0", "decode/d0")
ALL = ("prefill/p0", "prefill/p1", "decode/d0", "decode/d1")
"""Of what computes: a node, and everything."""


async def kill(system: Cached, names: tuple[str, ...], *, is_told: bool) -> None:
    """As their supervisor sees it: killed together, told of or not, and started anew a little later."""
    for name in names:
        system.kill(name)
    for name in names if is_told else ():
        exited = ProcessExited(name="x", pid=system.pids[name], members=[name])
        await system.listener.bus.tell(EXITED.all(), exited)
    await asyncio.sleep(0.5)
    for name in names:
        await start(system, name)


async def start(system: Cached, name: str) -> None:
    role, _, id = name.partition("/")
    if role == "entrypoint":
        await system.add_entrypoint(id)
    elif role.endswith("balancer"):
        actor = type(system.actors[name])
        await system.add(actor(id, await system.bus(name)))
    else:
        await system.restart(name)  # kills what is dead once more


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of a system where nothing happens."""

    async def main() -> list[list[int]]:
        async with core(0, 0) as alone:
            await alone.with_prefill("p", max_tokens=20_000)
            await alone.with_decode("d", max_tokens=20_000)
            return [(await alone.finish(one))[0] for one in asked("r")]

    return run_virtual(main())


def asked(name: str) -> list[Submit]:
    return [ask(f"{name}{i}", prompt(400 + 200 * i, i), 200) for i in range(NUM)]


def test_a_burst_after_idleness_that_outlives_every_lease(expected: list[list[int]]) -> None:
    async def main() -> None:
        async with cached() as system:
            await system.finish(asked("warm")[0])
            await asyncio.sleep(700.0)
            wanted = [one for number in range(4) for one in asked(f"r{number}.")]
            answers = await asyncio.gather(*map(system.finish, wanted))
            assert [tokens for tokens, _ in answers] == expected * 4
            assert await quiet(system, BOUND_S) == {}

    run_virtual(main())


@pytest.mark.parametrize(("at_s", "is_told"), [(0.003, False), (0.06, True)])
@pytest.mark.parametrize("names", [*((name,) for name in FRONT), ("prefill/p0",), ("decode/d0",), WORKERS, ALL, FRONT])
def test_all_end_within_the_bound_and_nothing_is_left(
    names: tuple[str, ...], at_s: float, is_told: bool, expected: list[list[int]]
) -> None:
    async def main() -> None:
        wanted = asked("r")
        async with cached() as system:
            for one in wanted:
                await system.send(one)
            await asyncio.sleep(at_s)
            assert system.entrypoint.shard.num_live == NUM
            await kill(system, names, is_told=is_told)
            if "entrypoint/e0" in names:  # its recipes end what it had
                assert await quiet(system, BOUND_S) == {}
                wanted = asked("again")
                for one in wanted:
                    await system.send(one)
            async with asyncio.timeout(BOUND_S):
                await asyncio.gather(*(system.listener.over(one.request_id).wait() for one in wanted))
            assert [system.listener.ends[one.request_id] for one in wanted] == [LENGTH] * NUM
            assert [system.listener.tokens[one.request_id] for one in wanted] == expected
            assert await quiet(system, BOUND_S) == {}

    run_virtual(main())


@pytest.mark.parametrize("id", ["e0", "e1"])
@pytest.mark.parametrize("at_s", [0.003, 0.06])
def test_another_shard_goes_on_behind_what_was_told(id: str, at_s: float, expected: list[list[int]]) -> None:
    """As a recipe asks of it, when the one that had a request is lost; who worked for that one lets go."""

    async def main() -> None:
        async with cached() as system:
            for one in asked("r"):
                await system.send(one)
            await asyncio.sleep(at_s)
            system.kill("entrypoint/e0")
            await system.add_entrypoint(id)
            for one in asked("r"):
                told = system.listener.tokens.setdefault(one.request_id, [])
                moved = f"{one.request_id}-1"
                system.listener.tokens[moved] = list(told)
                text = Payload(inline=one.prompt.inline + array("I", told).tobytes())
                submit = structs.replace(one, request_id=moved, prompt=text, num_output=len(told))
                await system.listener.bus.ask(SUBMIT.at(id), submit, timeout_s=5)
            async with asyncio.timeout(BOUND_S):
                await asyncio.gather(*(system.listener.over(f"r{i}-1").wait() for i in range(NUM)))
            assert [system.listener.tokens[f"r{i}-1"] for i in range(NUM)] == expected
            assert [system.listener.ends[f"r{i}-1"] for i in range(NUM)] == [LENGTH] * NUM
            assert any(system.listener.tokens[f"r{i}"] for i in range(NUM)) == (at_s > 0.01)
            held_by_the_dead = {"entrypoint"} if id == "e1" else set()
            assert set(await quiet(system, 10.0)) <= held_by_the_dead

    run_virtual(main())
