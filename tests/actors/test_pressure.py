"""Decode with less room than its requests come to need: who makes way, and that nobody loses a token by it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from actors.decode.actor import Decode
from actors.decode.pressure import Relief, relieve
from actors.decode.slots import Slots
from actors.entrypoint.request import MAX_PREEMPTIONS
from actors.recipe.grammar import Asked
from bus.bus import BusError, Delivery, decoder
from bus.claiming import output_before
from bus.memory import MemoryWire
from kernels.engine import Admission
from kernels.engine import Sampling as EngineSampling
from kernels.timed import StepCost, TimedEngine
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.handover import Dispatch
from schemas.request import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    Limits,
    Preempted,
    Sampling,
    Submit,
    TokensEmitted,
)
from tests.actors.builders import hand_over, submit
from tests.actors.cached import ask, cached, prompt
from tests.actors.constrained import grammars, text_of, tokenizer_file
from tests.actors.core import VOCABULARY, Core, core, info, quiet
from tests.actors.preempting import preempt_at

GREEDY = EngineSampling(0.0, 1.0, 0)
LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=10_000_000)
NUM_REQUESTS, NUM_OUTPUT = 8, 600
CAPACITY = 2048
"""16 blocks. A request comes to need 6, and nobody knows that before: 3 are expected of it."""


class Watching(RecordingBroker):
    """Notes who was preempted and what was dispatched, and loses what `is_lost` says."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted: list[str] = []
        self.dispatched: list[Dispatch] = []
        self.is_lost: Callable[[Delivery], bool] = lambda delivery: False
        self.has_preempted = asyncio.Event()

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if is_of_tokens(delivery) and (ids := given_back(delivery)):
            self.preempted += ids
            self.has_preempted.set()
        elif delivery.subject.endswith(".dispatch"):
            self.dispatched.append(decoder(Dispatch).decode(delivery.body))
        if not self.is_lost(delivery):
            super().publish(source, delivery)


def is_of_tokens(delivery: Delivery) -> bool:
    return delivery.subject == "shoal.entrypoint.e0.tokens"


def given_back(delivery: Delivery) -> list[str]:
    emitted = decoder(TokensEmitted).decode(delivery.body)
    return [emitted.request_ids[i] for i, end in emitted.ends if isinstance(end, Preempted)]


def requests() -> list[Submit]:
    """Greedy ones and seeded ones."""
    return [
        submit(f"r{i}", 90 + i, NUM_OUTPUT, sampling=Sampling(temperature=float(i % 2), top_p=1.0, seed=i))
        for i in range(NUM_REQUESTS)
    ]


async def run(
    broker: Watching, capacity: int, during: Callable[[Core], Awaitable[None]] | None = None, num_decode: int = 1
) -> Core:
    async with core(0, 0, broker=broker) as system:
        await system.with_prefill("p0", SLOW, num_slots=8)
        for number in range(num_decode):
            await system.with_decode(f"d{number}", SLOW, num_slots=8, capacity_tokens=capacity)
        for request in requests():
            await system.send(request)
        if during is not None:
            await during(system)
        for request in requests():
            await system.listener.over(request.request_id).wait()
        assert await quiet(system, 120.0) == {}
        return system


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    """The tokens of a run in which there is room for all."""
    broker = Watching()
    system = run_virtual(run(broker, 1 << 16))
    assert broker.preempted == [] and set(system.listener.ends.values()) == {LENGTH}
    return system.listener.tokens


def test_with_twice_too_much_all_ends_as_it_would_have(
    truth: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    broker, counted = Watching(), list[float]()

    async def during(system: Core) -> None:
        """The oldest is never late: it has a step in every step's time."""
        await system.listener.over("r0").wait()
        assert asyncio.get_running_loop().time() < NUM_OUTPUT * 0.01 + 1.0
        await broker.has_preempted.wait()
        counted.append(system.actors["decode/d0"].load().detail["preempted"])

    system = run_virtual(run(broker, CAPACITY, during))
    assert system.listener.tokens == truth and set(system.listener.ends.values()) == {LENGTH}
    assert 1 <= max(Counter(broker.preempted).values()) <= MAX_PREEMPTIONS and "r0" not in broker.preempted
    assert sum("makes way" in record.message for record in caplog.records) == len(broker.preempted)
    assert counted[0] > 0
    rebuilt = [one for one in broker.dispatched if one.num_output]
    for one in rebuilt:
        assert one.num_prompt_tokens - one.num_output == 90 + int(one.request_id[1:])
    num_before: Counter[str] = Counter()
    for one in rebuilt:
        num_before[one.request_id] += 1
        assert one.is_protected == (num_before[one.request_id] >= MAX_PREEMPTIONS)


def test_who_made_way_twice_has_all_its_room_next_time() -> None:
    """Short answers have everybody expected to be short. Tokens are lost on their way all the while."""

    async def mixed(broker: Watching, capacity: int) -> dict[str, list[int]]:
        async with core(0, 0, broker=broker) as system:
            await system.with_prefill("p0", SLOW, num_slots=16)
            await system.with_decode("d0", SLOW, num_slots=16, capacity_tokens=capacity)
            for i in range(10):
                await system.send(submit(f"short{i}", 20, 5))
            for i in range(7):
                await system.send(submit(f"r{i}", 90 + i, NUM_OUTPUT))
                await asyncio.sleep(0.5)
                await system.send(submit(f"more{i}", 20, 5))
            for i in range(7):
                await system.listener.over(f"r{i}").wait()
            assert set(system.listener.ends.values()) == {LENGTH} and await quiet(system) == {}
            return system.listener.tokens

    truth = run_virtual(mixed(Watching(), 1 << 16))
    broker, numbers = Watching(), count()
    broker.is_lost = lambda delivery: is_of_tokens(delivery) and not given_back(delivery) and next(numbers) % 3 != 1
    assert run_virtual(mixed(broker, 1280)) == truth
    num_before: Counter[str] = Counter()
    for one in broker.dispatched:
        num_before[one.request_id] += bool(one.num_output)
        assert one.is_protected == (num_before[one.request_id] >= MAX_PREEMPTIONS)
    assert max(num_before.values()) == MAX_PREEMPTIONS


def test_who_made_way_waits_longer_than_who_is_new() -> None:
    broker = Watching()

    async def main() -> None:
        async with core(0, 0, broker=broker) as system:
            await system.with_prefill("p0")
            await system.with_decode("d0", StepCost(step_ns=800_000_000), capacity_tokens=768)
            for id in ("old", "young"):
                await system.send(submit(id, 100, NUM_OUTPUT))
            await broker.has_preempted.wait()
            system.kill("prefill/p0")
            await asyncio.sleep(25.0)
            await system.with_prefill("p0")
            for id in ("old", "young"):
                await system.listener.over(id).wait()
            assert system.listener.ends == {"old": LENGTH, "young": LENGTH} and await quiet(system) == {}

    run_virtual(main())


def test_who_is_on_its_way_in_is_turned_away_first_and_comes_again() -> None:
    broker = Watching()

    async def main() -> None:
        async with core(0, 0, broker=broker) as system:
            await system.with_prefill("p0", SLOW, num_slots=8)
            await system.with_decode("d0", SLOW, num_slots=8, capacity_tokens=768)
            bulk = system.bulks["decode/d0"]
            pull, pauses = bulk.pull, [0.0, 4.0]

            async def slow_pull(*args: Any, **fields: Any) -> bytes:
                await asyncio.sleep(pauses.pop(0) if pauses else 0.0)
                return await pull(*args, **fields)

            bulk.pull = slow_pull  # type: ignore[method-assign]
            await system.send(submit("r0", 100, NUM_OUTPUT))
            await asyncio.sleep(0.5)
            await system.send(submit("late", 60, 20))
            for id in ("r0", "late"):
                await system.listener.over(id).wait()
            assert system.listener.ends == {"r0": LENGTH, "late": LENGTH} and await quiet(system) == {}
            assert pauses == [] and broker.preempted == []

    run_virtual(main())


def test_the_news_may_be_lost(truth: dict[str, list[int]]) -> None:
    broker, lost, numbers = Watching(), set[str](), count()

    def is_lost(delivery: Delivery) -> bool:
        """The first of each; and other tokens now and then."""
        if not is_of_tokens(delivery):
            return False
        new = set(given_back(delivery)) - lost
        lost.update(new)
        return bool(new) or next(numbers) % 3 == 1

    broker.is_lost = is_lost
    system = run_virtual(run(broker, CAPACITY))
    assert system.listener.tokens == truth and lost and len(broker.preempted) > len(lost)


def told(system: Core, id: str) -> list[tuple[float, int]]:
    """What was said of each of its tokens."""
    parts = system.listener.logprobs[id]
    return [pair for part in parts for pair in zip(part.sampled, part.top_tokens, strict=True)]


@pytest.mark.parametrize(("num_exact", "is_approximate"), [(1024, False), (0, True)])
def test_what_was_stored_of_it_is_restored(
    monkeypatch: pytest.MonkeyPatch, num_exact: int, is_approximate: bool
) -> None:
    """Blocks of its prompt when it is to be exact; else those of its output, too, with the windows behind them."""
    for module in ("actors.rules.hit", "actors.entrypoint.request"):
        monkeypatch.setattr(f"{module}.EXACT_OUTPUT", num_exact)
    text, sampling = prompt(700), Sampling(temperature=1.0, top_p=1.0, seed=3, top_logprobs=1)

    async def main() -> None:
        async with cached() as system:
            whole = await system.run(ask("whole", text, NUM_OUTPUT, cache="other", sampling=sampling))
            await system.settle()
            preempt_at(monkeypatch, ["again"], 300)
            assert await system.run(ask("again", text, NUM_OUTPUT, sampling=sampling)) == whole
            assert told(system, "again") == told(system, "whole")
            request = system.entrypoint.shard.get("again")
            assert request is not None and request.num_rebuilt == 1 and system.listener.cached.get("again", 0) == 0
            assert request.is_approximate is is_approximate
            assert system.total("replayed_tokens") == 0
            assert system.total("restored_tokens") == (512 if num_exact else 768)
            assert system.entrypoint.load().detail["rebuilt"] == 1

    run_virtual(main())


def test_its_grammar_goes_on_where_its_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "array", "items": {"enum": ["left", "right", 17]}, "minItems": 12, "maxItems": 12}
    grammar = grammars().find(Asked(json=json.dumps(schema), thinks=False)).text
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=5, grammar=grammar)
    spelling = info(vocab_size=1024)

    async def main() -> None:
        async with core(1, 0, SLOW) as system:
            engine = TimedEngine(spelling, range(10, 1000), SLOW)
            bus, bulk = await system.bus("decode/d0"), await system.bulk("decode/d0")
            await system.add(Decode("d0", bus, bulk, engine, tokenizer=tokenizer_file()))
            whole, end = await system.finish(submit("whole", 100, 400, sampling=sampling))
            assert end == Finished(reason=FinishReason.STOP) and len(json.loads(text_of(whole))) == 12
            preempt_at(monkeypatch, ["again"], len(whole) // 2)
            again, end = await system.finish(submit("again", 100, 400, sampling=sampling))
            request = system.entrypoint.shard.get("again")
            assert request is not None and request.num_rebuilt == 1
            assert (again, end) == (whole, Finished(reason=FinishReason.STOP))

    run_virtual(main())


def test_who_takes_one_over_can_have_its_output_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rules.emission.MAX_TOKENS", 100)  # of one message

    async def during(system: Core) -> None:
        tokens = system.listener.tokens
        while len(tokens.get("r0", [])) < 250:
            await asyncio.sleep(0.01)
        offer = structs.replace(hand_over("r0"), num_output=250)
        assert await output_before(system.listener.bus, offer) == tokens["r0"][:250]
        with pytest.raises(BusError, match="does not have the output"):
            await output_before(system.listener.bus, structs.replace(offer, request_id="nobody"))

    run_virtual(run(Watching(), CAPACITY, during))


async def some(num_turns: int, num_ms: int) -> None:
    """Turns of the loop in which no time passes, then time."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await asyncio.sleep(num_ms / 1000)


MOMENTS = [(0, 0), (3, 0), (6, 0), (15, 0), (0, 12)]
"""Decode has it still; nobody; prefill is given it; has it; has it, and waits for room."""


@pytest.mark.parametrize(("num_turns", "num_ms"), MOMENTS)
def test_cancelled_at_any_time_of_its_way_back(truth: dict[str, list[int]], num_turns: int, num_ms: int) -> None:
    broker = Watching()

    async def during(system: Core) -> None:
        await broker.has_preempted.wait()
        await some(num_turns, num_ms)
        assert (await system.cancel(broker.preempted[0])).was_running

    system = run_virtual(run(broker, CAPACITY, during))
    gone = broker.preempted[0]
    assert system.listener.ends.pop(gone) == Cancelled() and set(system.listener.ends.values()) == {LENGTH}
    assert system.listener.tokens == {**truth, gone: truth[gone][: len(system.listener.tokens[gone])]}


@pytest.mark.parametrize(("num_turns", "num_ms"), MOMENTS[::2])
def test_decode_is_killed_while_one_makes_way(truth: dict[str, list[int]], num_turns: int, num_ms: int) -> None:
    broker = Watching()

    async def during(system: Core) -> None:
        await broker.has_preempted.wait()
        await some(num_turns, num_ms)
        system.kill("decode/d0")
        await asyncio.sleep(1.0)
        await system.with_decode("d0", SLOW, num_slots=8, capacity_tokens=CAPACITY)

    system = run_virtual(run(broker, CAPACITY, during))
    assert system.listener.tokens == truth and set(system.listener.ends.values()) == {LENGTH}


def test_the_deadline_holds_for_one_that_waits_to_be_computed_anew(truth: dict[str, list[int]]) -> None:
    broker = Watching()

    async def main() -> None:
        async with core(0, 0, broker=broker) as system:
            await system.with_prefill("p0", SLOW, num_slots=8)
            await system.with_decode("d0", SLOW, num_slots=8, capacity_tokens=768)
            now_ns = system.entrypoint.bus.seams.clock_ns()
            limits = Limits(max_tokens=NUM_OUTPUT)
            await system.send(submit("old", 100, limits=limits))
            await system.send(submit("young", 100, limits=structs.replace(limits, deadline_ns=now_ns + 2_000_000_000)))
            _, end = await system.finish(submit("last", 100, 5))
            for id in ("young", "old"):
                await system.listener.over(id).wait()
            assert broker.preempted == ["young"] and end == system.listener.ends["old"] == LENGTH
            late = system.listener.ends["young"]
            assert isinstance(late, Failed) and late.failure.code is Code.DEADLINE_EXCEEDED
            assert await quiet(system) == {}

    run_virtual(main())


# The policy alone


def short_ones(capacity: int) -> Slots:
    """Where outputs are expected to be short."""
    slots = Slots(8, capacity, 900)
    slots.outputs.add(1)
    return slots


def run_one(slots: Slots, id: str, num_tokens: int, max_tokens: int, *, is_protected: bool = False) -> None:
    offer = structs.replace(hand_over(id, num_tokens, max_tokens), is_protected=is_protected)
    generation = slots.arrive(offer)
    if generation is not None:
        generation.epoch, generation.is_in_engine = 1, True


def test_none_makes_way_before_another_cannot_go_on_without() -> None:
    slots = short_ones(640)
    run_one(slots, "old", 100, 500)
    run_one(slots, "young", 120, 500)
    slots.arrive(hand_over("coming", 10, 5))
    old, young, coming = slots
    assert (old.num_reserved, young.num_reserved, coming.num_reserved, slots.num_free_blocks) == (128, 128, 15, 2)
    old.tokens += [5] * 28
    assert relieve(list(slots), 0, 900) == Relief(), "drafts have no room, but the step has"
    young.tokens += [5] * 9
    assert relieve(list(slots), 0, 900) == Relief(grown=[(young, 256)], turned_away=[coming])
    coming.epoch, coming.is_in_engine = 1, True
    assert relieve(list(slots)[:2], 0, 900) == Relief(waiting=[young])
    old.tokens += [5]
    assert relieve(list(slots)[:2], 0, 900) == Relief(grown=[(old, 256)], preempted=[young])
    young.offer = structs.replace(young.offer, is_protected=True)
    young.num_reserved = 620
    assert relieve(list(slots)[:2], 0, 900) == Relief(waiting=[old])


EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 600), st.integers(1, 900)),
    st.tuples(st.just("protected"), st.integers(1, 600), st.integers(1, 900)),
    st.tuples(st.just("coming"), st.integers(1, 600), st.integers(1, 900)),
    st.tuples(st.just("step"), st.integers(1, 6), st.integers(1, 60)),
    st.tuples(st.just("end"), st.integers(0, 7), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=10, max_size=60))
def test_however_they_grow_room_is_never_overdrawn_and_the_oldest_stays(events: list[tuple[str, int, int]]) -> None:
    slots, ids = short_ones(1024), count()
    engine = TimedEngine(info(num_slots=8, capacity_tokens=1024), VOCABULARY)
    for kind, first, second in events:
        match kind:
            case "arrive" | "protected":
                run_one(slots, f"r{next(ids)}", first, second, is_protected=kind == "protected")
            case "coming":
                slots.arrive(hand_over(f"r{next(ids)}", first, second))
            case "end":
                for one in list(slots)[first : first + 1]:
                    slots.leave(one, 0.0)
            case "step":
                for _ in range(second):
                    _step(slots, engine, first)
        _follow(engine, slots)


def _follow(engine: TimedEngine, slots: Slots) -> None:
    """It has what the slots say that it has, and room for those that are coming."""
    held = {one.id: one for one in slots if one.is_in_engine}
    for id in set(engine._requests._requests) - held.keys():
        engine.free(id)
    for id, one in held.items():
        if id not in engine._requests._requests:
            assert engine.admit(id, one.num_reserved, GREEDY) is Admission.OK
    num_coming = sum(-(-one.num_reserved // 128) for one in slots if not one.is_in_engine)
    assert slots.num_free_blocks == 8 - engine._requests.num_blocks - num_coming >= 0


def _step(slots: Slots, engine: TimedEngine, num_new: int) -> None:
    """Relief, then a step of those who take part, as the actor and an engine do it."""
    here, was_free = list(slots), slots.num_free_blocks
    relief = relieve(here, was_free, slots.max_tokens)
    able = [one for one in here if one.epoch and not one.offer.is_protected]
    for one in relief.preempted:
        assert one in able[1:] and here.index(one) > min(here.index(other) for other, _ in relief.grown)
    assert all(not one.is_in_engine for one in relief.turned_away)
    gone = relief.preempted + relief.turned_away
    if gone:  # none without need: without the last one of them somebody could not have done its step
        assert relief.preempted == able[len(able) - len(relief.preempted) :]
        num_freed = sum(-(-one.num_reserved // 128) for one in gone[:-1])
        older = [one for one in here[: here.index(gone[-1])] if one.epoch and one not in gone]
        needed = sum(max(0, -(-one.num_tokens // 128) - -(-one.num_reserved // 128)) for one in older)
        assert was_free + num_freed < needed
    for one, num_tokens in relief.grown:
        assert one.num_reserved < num_tokens <= one.num_wanted(slots.max_tokens)
        one.num_reserved = num_tokens
    for one in gone:
        slots.leave(one, 0.0)
        engine.free(one.id)
    for one, num_tokens in relief.grown:
        assert engine.grow(one.id, num_tokens)
    _follow(engine, slots)
    for one in [one for one in slots if one.epoch and one not in relief.waiting]:
        assert one.num_tokens <= one.num_reserved
        one.tokens += [5] * min(num_new, one.num_reserved - one.num_tokens + 1)
        if one.num_tokens >= one.num_wanted(slots.max_tokens):
            slots.leave(one, 0.0)
            engine.free(one.id)
    going = [one for one in here if one.epoch and one not in gone]
    if going and all(one in relief.waiting for one in going):
        assert any(not one.epoch for one in slots), "nobody goes on"
