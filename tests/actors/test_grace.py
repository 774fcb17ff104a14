"""A decode replica that leaves: others go on with its requests, and no client sees it. Real actors, a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from actors.decode.actor import Decode
from actors.entrypoint.request import Request
from actors.prefill.actor import Prefill
from actors.recipe.grammar import Asked
from actors.rules.chain import chain, root
from bus.actor import LAST_S
from bus.bus import Delivery
from bus.memory import MemoryWire
from kernels.timed import StepCost, TimedEngine
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.request import Cancelled, Failed, Finished, FinishReason, Sampling, Submit
from supervisors.grace import AT_ONCE, MOVING_S
from supervisors.leaving import PATIENCE_S
from tests.actors.builders import submit
from tests.actors.cached import ask, cached, prompt
from tests.actors.constrained import END, VOCABULARY, grammars, text_of, tokenizer_file
from tests.actors.core import Core, core, info, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=10_000_000)
SCHEMA = json.dumps({"type": "string", "pattern": "^[a-z]{24}$"})


class Lossy(RecordingBroker):
    """Loses what `is_lost` says, by verb."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost: Callable[[str, Delivery], bool] = lambda verb, delivery: False

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if not self.is_lost(delivery.subject.rpartition(".")[2], delivery):
            super().publish(source, delivery)


def decode(system: Core, id: str = "d0") -> Decode:
    actor = system.actors[f"decode/{id}"]
    assert isinstance(actor, Decode)
    return actor


def fates(system: Core, id: str = "d0") -> dict[str, int]:
    """Of those that were frozen."""
    return {fate.name: num for fate, num in decode(system, id)._leaving.grace.counts.items() if num}


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def has_output(system: Core, num: int, id: str = "d0") -> None:
    """Its first request has so much output."""
    await until(lambda: any(one.num_output >= num for one in decode(system, id).slots))


async def undisturbed(*requests: Submit) -> dict[str, list[int]]:
    async with core(1, 0, SLOW) as system:
        await system.with_decode("d0", SLOW, num_slots=64)
        return {one.request_id: (await system.finish(one))[0] for one in requests}


def test_a_replica_that_leaves_under_load_loses_nothing() -> None:
    async def main() -> None:
        requests = [
            submit(
                f"r{i}",
                1 + 37 * i % 300,
                80 + 7 * i % 50,
                sampling=Sampling(temperature=i % 2, top_p=1.0, seed=i, top_logprobs=2 if i % 3 == 0 else -1),
            )
            for i in range(24)
        ]
        expected = await undisturbed(*requests)
        async with core(2, 0, SLOW) as system:
            await system.with_decode("d0", SLOW, num_slots=32)
            running = [asyncio.create_task(system.finish(one)) for one in requests]
            await until(lambda: len(decode(system).slots.running()) == 24)
            await system.with_decode("d1", SLOW, num_slots=32)
            began_s = asyncio.get_running_loop().time()
            await decode(system).leave(0.3)
            assert asyncio.get_running_loop().time() - began_s < 0.3 + MOVING_S
            assert await asyncio.gather(*running) == [(expected[one.request_id], LENGTH) for one in requests]
            assert fates(system).keys() <= {"MOVED"} and fates(system)["MOVED"] > AT_ONCE
            detail = decode(system).load().detail
            assert 0 < detail["pause_ms_p50"] <= detail["pause_ms_p99"] < 1000
            for one in requests[::3]:
                said = system.listener.logprobs[one.request_id]
                assert sum(len(logprobs.sampled) for logprobs in said) == len(expected[one.request_id])
            assert await quiet(system) == {}

    run_virtual(main())


def test_those_that_wait_for_room_until_the_end_are_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are frozen at a time, and none that another replica has room for: they keep nobody here."""
    is_large = [f"r{i}" for i in range(AT_ONCE)]
    monkeypatch.setattr(Request, "is_protected", property(lambda self: self.id in is_large))

    async def main() -> None:
        async with core(1, 0, SLOW) as system:
            await system.with_decode("d0", SLOW, num_slots=8)
            running = [asyncio.create_task(system.finish(submit(id, 300, 600))) for id in is_large]
            await until(lambda: len(decode(system).slots.running()) == AT_ONCE)
            running.append(asyncio.create_task(system.finish(submit("small", 20, 200))))
            await until(lambda: len(decode(system).slots.running()) == AT_ONCE + 1)
            await system.with_decode("d1", SLOW, num_slots=1, max_tokens=256)
            await decode(system).leave(0.0)
            assert fates(system) == {"MOVED": 1, "GIVEN_BACK": AT_ONCE} and (await running[-1])[1] == LENGTH
            await system.with_decode("d2", SLOW)
            assert {end for _, end in await asyncio.gather(*running)} == {LENGTH}

    run_virtual(main())


def test_those_that_end_within_the_grace_are_left_alone() -> None:
    async def main() -> None:
        async with core(1, 2, SLOW) as system:
            running = [asyncio.create_task(system.finish(submit(f"r{i}", max_tokens=30))) for i in range(4)]
            await has_output(system, 1)
            num_here = len(decode(system).slots)
            await decode(system).leave(60.0)
            assert num_here and fates(system) == {} and asyncio.get_running_loop().time() < 5.0
            assert {end for _, end in await asyncio.gather(*running)} == {LENGTH}

    run_virtual(main())


def engine() -> TimedEngine:
    """One token a step, of the tokenizer of grammars; steps are longer than a move takes."""
    return TimedEngine(info(vocab_size=VOCABULARY, eos_token=END), range(3, 1000), StepCost(step_ns=200_000_000))


async def moved_at_every_token(request: Submit) -> tuple[list[int], object, int]:
    """Its output and end, when its owner leaves at every token, and how often it was moved."""
    async with core(1, 0) as system:
        for number in itertools.count():
            bus, bulk = await system.bus(f"decode/d{number}"), await system.bulk(f"decode/d{number}")
            await system.add(Decode(f"d{number}", bus, bulk, engine(), tokenizer=tokenizer_file()))
            if number == 0:
                await system.send(request)
            else:
                await decode(system, f"d{number - 1}").leave(0.0)
                assert fates(system, f"d{number - 1}").keys() <= {"MOVED"}
            reached = asyncio.create_task(has_output(system, number + 1, f"d{number}"))
            over = asyncio.create_task(system.listener.over("r1").wait())
            await asyncio.wait([reached, over], return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            if over.done():
                assert await quiet(system) == {}
                return system.listener.tokens["r1"], system.listener.ends["r1"], number
    raise AssertionError


@pytest.mark.parametrize("is_constrained", [False, True])
def test_moved_at_every_token(is_constrained: bool) -> None:
    """Its grammar goes with it: what it says is what it would have said, and can be parsed."""
    grammar = grammars().find(Asked(json=SCHEMA)).text if is_constrained else ""
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=3, grammar=grammar)
    request = submit("r1", 120, 200 if is_constrained else 24, sampling=sampling)

    async def alone() -> tuple[list[int], object]:
        async with core(1, 0) as system:
            bus, bulk = await system.bus("decode/d0"), await system.bulk("decode/d0")
            await system.add(Decode("d0", bus, bulk, engine(), tokenizer=tokenizer_file()))
            return await system.finish(request)

    async def main() -> None:
        expected, end = await alone()
        assert await moved_at_every_token(request) == (expected, end, len(expected) - (not is_constrained))
        if is_constrained:
            assert re.fullmatch("[a-z]{24}", json.loads(text_of(expected)))

    run_virtual(main())


def test_blocks_have_their_names_wherever_it_is_moved() -> None:
    """Also at their very border: then nobody stores what both have a part in, or the last of them does."""
    text, num_tokens = prompt(100), 700

    async def main() -> None:
        for num_output in (28, 200):
            async with cached() as system:
                running = asyncio.create_task(system.finish(ask("r1", text, num_tokens - 100)))
                await until(lambda: any(len(decode(system, d).slots) for d in ("d0", "d1")))
                owner = next(d for d in ("d0", "d1") if len(decode(system, d).slots))
                await has_output(system, num_output, owner)
                await decode(system, owner).leave(0.0)
                assert fates(system, owner) == {"MOVED": 1}
                output, _ = await running
                await system.settle()
                whole = np.frombuffer(text, "<u4").tolist() + output
                again = np.array([*whole[: num_tokens - 1], 7], "<u4").tobytes()
                assert await system.run(ask("r2", again))
                assert system.listener.cached["r2"] >= (num_tokens - 1) // 128 * 128 - 128, num_output
                assert len(chain(root("timed"), np.array(whole, "<u4"))) == 5

    run_virtual(main())


def test_without_anyone_to_take_them_they_are_given_back_and_wait() -> None:
    async def main() -> None:
        requests = [submit(f"r{i}", max_tokens=300) for i in range(3 * AT_ONCE)]
        expected = await undisturbed(*requests)
        async with core(1, 0, SLOW) as system:
            await system.with_decode("d0", StepCost(step_ns=100_000_000), num_slots=len(requests))
            running = [asyncio.create_task(system.finish(one)) for one in requests]
            await until(lambda: sum(one.num_output > 0 for one in decode(system).slots) == len(requests))
            began_s = asyncio.get_running_loop().time()
            await decode(system).leave(0.2)
            assert asyncio.get_running_loop().time() - began_s < 0.2 + 2 * PATIENCE_S, "the first ones wait for all"
            assert fates(system) == {"GIVEN_BACK": 3 * AT_ONCE} and len(decode(system).slots) == 0
            system.kill("decode/d0")  # nobody misses it: all was said
            await system.with_decode("d1", SLOW, num_slots=len(requests))
            assert await asyncio.gather(*running) == [(expected[one.request_id], LENGTH) for one in requests]
            detail = system.entrypoint.shard.detail()
            assert detail["rebuilt"] == 3 * AT_ONCE and detail["lost"] == 0
            assert await quiet(system) == {}

    run_virtual(main())


def test_it_is_not_moved_before_its_entrypoint_has_all_of_its_output() -> None:
    """What is lost on the way is asked for, as long as somebody has it."""
    broker = Lossy()

    async def main() -> None:
        request = submit("r1", 50, 150)
        expected = await undisturbed(request)
        async with core(1, 1, SLOW, broker) as system:
            running = asyncio.create_task(system.finish(request))
            await has_output(system, 20)
            await system.with_decode("d1", SLOW)
            now_s = asyncio.get_running_loop().time
            found_s = now_s() + 0.5  # until then, that of its last step
            broker.is_lost = lambda verb, delivery: verb == "tokens" and now_s() < found_s
            await decode(system).leave(0.0)
            assert fates(system) == {"MOVED": 1}
            assert await running == (expected["r1"], LENGTH)
            assert system.entrypoint.shard.detail()["rebuilt"] == 0

    run_virtual(main())


@pytest.mark.parametrize("lost", ["handover", "claim", "route", "refused", "full", "tokens"])
def test_whatever_is_lost_on_the_way_the_client_gets_all_of_it_once(lost: str) -> None:
    broker, num_lost = Lossy(), 0

    async def main() -> None:
        nonlocal num_lost
        request = submit("r1", 50, 150)
        expected = await undisturbed(request)
        async with core(2, 1, SLOW, broker) as system:
            running = asyncio.create_task(system.finish(request))
            await has_output(system, 20)
            await system.with_decode("d1", SLOW, num_slots=0 if lost == "full" else 4)
            decode(system, "d1").is_draining = lost == "refused"

            def is_lost(verb: str, delivery: Delivery) -> bool:
                nonlocal num_lost
                is_it = verb == lost and num_lost < (3 if lost == "claim" else 1)
                num_lost += is_it
                return is_it

            broker.is_lost = is_lost
            began_s = asyncio.get_running_loop().time()
            await decode(system).leave(0.1)
            assert asyncio.get_running_loop().time() - began_s < 0.1 + LAST_S
            decode(system, "d1").is_draining = False
            await system.with_decode("d2", SLOW)
            assert await running == (expected["r1"], LENGTH)
            assert num_lost or lost in ("refused", "full")
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize("victim", ["source", "destination", "entrypoint"])
@pytest.mark.parametrize("when", ["pull", "claim", "handed over"])
def test_whoever_dies_on_the_way_it_goes_on_or_ends_typed(victim: str, when: str) -> None:
    """At a step of the move: while the state is pulled, when it is claimed, and before the source hears of that."""
    broker = Lossy()

    async def main() -> None:
        request = submit("r1", 50, 150)
        expected = await undisturbed(request)
        async with core(2, 1, SLOW, broker) as system:
            running = asyncio.create_task(system.finish(request))
            await has_output(system, 20)
            await system.with_decode("d1", SLOW)
            has_come = asyncio.Event()

            def is_lost(verb: str, delivery: Delivery) -> bool:
                is_it = verb == {"pull": "handover", "claim": "claim"}.get(when, "release") and not has_come.is_set()
                if is_it:
                    has_come.set()
                return False

            broker.is_lost = is_lost
            leaving = asyncio.create_task(decode(system).leave(0.1))
            await has_come.wait()
            name = {"source": "decode/d0", "destination": "decode/d1", "entrypoint": "entrypoint/e0"}[victim]
            system.kill(name)
            if victim == "entrypoint":  # its requests die with it; what others held for it is free
                running.cancel()
                await leaving
                await system.add_entrypoint("e0")
                assert not len(decode(system).slots)
                assert (await system.finish(submit("r2")))[1] == LENGTH
            else:
                await system.with_decode("d2", SLOW)
                assert await running == (expected["r1"], LENGTH)
                if victim == "destination":
                    await leaving
            leaving.cancel()
            assert await quiet(system, 120.0) == {}

    run_virtual(main())


@pytest.mark.parametrize("wait_s", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03])
def test_a_cancel_on_the_way_frees_both_sides(wait_s: float) -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            await system.send(submit("r1", 50, 500))
            await has_output(system, 20)
            await system.with_decode("d1", SLOW)
            leaving = asyncio.create_task(decode(system).leave(0.0))
            await until(lambda: any(one.is_leaving for one in decode(system).slots))
            await asyncio.sleep(wait_s)
            assert (await system.cancel("r1")).was_running
            await leaving
            assert await quiet(system, 1.0) == {}
            assert system.listener.ends["r1"] == Cancelled() and fates(system).keys() <= {"MOVED", "ENDED"}

    run_virtual(main())


def test_a_cancel_does_not_wait_for_whom_it_is_offered_to() -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            await system.send(submit("r1", 50, 500))
            await has_output(system, 20)
            await system.with_decode("d1", StepCost(step_ns=5_000_000_000))
            decode(system).is_draining = True
            await decode(system).report_load()  # so that the next one goes to the other
            await system.send(submit("other", 50, 500))
            await until(lambda: bool(decode(system, "d1").slots.running()))
            leaving = asyncio.create_task(decode(system).leave(0.0))
            await until(lambda: len(decode(system, "d1").slots) == 2)
            await system.cancel("r1")
            await asyncio.sleep(0.1)
            assert fates(system) == {"ENDED": 1} and not len(decode(system).slots)
            await leaving
            await system.cancel("other")

    run_virtual(main())


def test_it_is_told_to_leave_while_another_leaves_too() -> None:
    """Nobody is moved to one that leaves itself; what is moved may be moved again."""

    async def main() -> None:
        requests = [submit(f"r{i}", max_tokens=200) for i in range(8)]
        expected = await undisturbed(*requests)
        async with core(1, 2, SLOW) as system:
            running = [asyncio.create_task(system.finish(one)) for one in requests]
            await until(lambda: len(decode(system).slots.running()) + len(decode(system, "d1").slots.running()) == 8)
            await system.with_decode("d2", SLOW, num_slots=16)
            await asyncio.gather(decode(system).leave(0.1), decode(system, "d1").leave(0.15))
            assert await asyncio.gather(*running) == [(expected[one.request_id], LENGTH) for one in requests]
            assert sum(fates(system, d).get("MOVED", 0) for d in ("d0", "d1")) >= 8

    run_virtual(main())


def test_a_prefill_replica_gives_back_what_it_has_not_begun_and_hands_over_the_rest() -> None:
    async def main() -> None:
        requests = [submit(f"r{i}", 600, 5) for i in range(12)]
        expected = await undisturbed(*requests)
        async with core(1, 0) as system:
            await system.with_decode("d0", num_slots=16)
            slow = system.actors["prefill/p0"]
            assert isinstance(slow, Prefill)
            slow._engine._cost = StepCost(prefill_token_ns=1_000_000)  # type: ignore[attr-defined]
            running = [asyncio.create_task(system.finish(one)) for one in requests]
            await until(lambda: len(slow.batch) == 12 and slow.batch.num_running > 0)
            await system.with_prefill("p1")
            await slow.leave(60.0)
            assert asyncio.get_running_loop().time() < 10.0 and len(slow.jobs) == 0
            assert await asyncio.gather(*running) == [(expected[one.request_id], LENGTH) for one in requests]
            detail = system.entrypoint.shard.detail()
            assert 0 < detail["rebuilt"] < 12
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize("num_decode", [0, 1])
def test_what_a_prefill_replica_has_at_the_end_of_the_grace_is_given_back(num_decode: int) -> None:
    """In the middle of its computation, and while no decode replica has room for it."""

    async def main() -> None:
        request = submit("r1", 900, 5)
        expected = await undisturbed(request)
        async with core(1, num_decode) as system:
            slow = system.actors["prefill/p0"]
            assert isinstance(slow, Prefill)
            if num_decode:
                slow._engine._cost = StepCost(prefill_token_ns=10_000_000)  # type: ignore[attr-defined]
            running = asyncio.create_task(system.finish(request))
            await until(lambda: bool(slow.jobs.leaving) or (num_decode > 0 and slow.batch.num_running > 0))
            await slow.leave(0.5)
            assert slow.is_drained
            await system.with_prefill("p1")
            if not num_decode:
                await system.with_decode("d0")
            assert await running == (expected["r1"], LENGTH)
            assert system.entrypoint.shard.detail()["rebuilt"] == 1
            assert await quiet(system) == {}

    run_virtual(main())


def test_an_entrypoint_waits_for_its_requests_and_gives_back_what_is_left() -> None:
    """Its recipes have another shard go on then: test_recipe_faults.py."""

    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            short, long = submit("short", max_tokens=20), submit("long", max_tokens=900)
            running = asyncio.create_task(system.finish(short))
            await system.send(long)
            leaving = asyncio.create_task(system.entrypoint.leave(1.0))
            assert (await running)[1] == LENGTH
            assert not leaving.done()
            await leaving
            end = system.listener.ends["long"]
            assert isinstance(end, Failed) and end.failure.code is Code.SHUTTING_DOWN
            assert 0 < len(system.listener.tokens["long"]) < 900
            assert await quiet(system) == {}

    run_virtual(main())
