"""A rank's side of its group: who is called when, what is told to whom, and that a group asleep is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.actor import Handler
from bus.bus import Delivery, decoder
from bus.meeting import GROW_S, INVITE_S, MOST_GROW_S, PRESENT_S, GroupLost, GroupOf, repeat
from bus.muster import AGAIN_S, GIVE_UP_S
from bus.ranks import EXITED_EARLY, REPEAT_S, REPORT_STEPS, Ranks
from bus.subjects import BROKEN, EXPERTS, MEET_DECODE, PLACE_DECODE, PRESENT_DECODE, STEP_DECODE, Subject
from run.virtual import run_virtual
from schemas.experts import ExpertsUsed, GroupBroken, MeetRanks, PlaceExperts, RankPresent, StepWanted
from schemas.liveness import ProcessExited
from schemas.message import Message, Role
from tests.bus.members import Place, place

IDS = ("d-0", "d-1")
LIVES = (100, 50)
PLACES = [np.array([[0, 1], [2, 3]]), np.array([[0], [1]])]


class FakeMember:
    """Of an engine that steps when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.generation = rank, len(IDS), 0
        self.num_steps = self.version = 0
        self.is_awake, self.is_broken = False, True
        self.is_called_off = self.is_abandoned = False
        self.places = PLACES
        self.errors: list[RuntimeError] = []
        """Of the next meetings."""
        self.meets = asyncio.Event()
        self.moved: list[tuple[int, list[Any]]] = []
        self.may_move = asyncio.Event()

    def listen(self) -> str:
        return f"rank {self.rank}"

    async def meet(self, generation: int, rank: int, size: int, address: str) -> None:
        self.meets.set()
        self.generation, self.rank, self.size = generation, rank, size
        await asyncio.sleep(0.05)
        if self.errors:
            raise self.errors.pop()
        self.num_steps = 0
        self.is_awake = self.is_broken = self.is_called_off = self.is_abandoned = False

    def call_off(self) -> None:
        self.is_called_off = True

    def abandon(self) -> None:
        self.is_abandoned = True

    def take_used(self) -> list[NDArray[np.int64]]:
        return [np.array([self.num_steps, 0, 0, 7]), np.array([0, 3])]

    async def rearrange(self, version: int, places: Sequence[NDArray[np.int64]]) -> None:
        if version == 13:
            raise ValueError("no such places")
        self.moved.append((version, [one.tolist() for one in places]))
        await self.may_move.wait()
        self.version = version


class FakeEngine:
    def __init__(self, rank: int) -> None:
        self.member = FakeMember(rank)
        self.group: FakeMember | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self) -> None:
        await self.may_start.wait()
        self.group = self.member


class Rank:
    """`Ranks` without an actor, so that nothing but it could do anything."""

    def __init__(self, here: Place, rank: int, *, least: int = 1) -> None:
        self.id, self.engine, self.least = IDS[rank], FakeEngine(rank), least
        self.member = self.engine.member
        self.num_called = 0
        self.is_deaf = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[Exception] = []
        self._here, self._life = here, LIVES[rank]

    async def listen(self) -> None:
        self.bus = await self._here.bus()
        group = GroupOf(IDS, self._life, least=self.least)
        self.ranks = Ranks(self.bus, Role.DECODE, self.id, group, self._spawn, self._on_called)
        for subject, handler in self.ranks.handlers().items():
            await self.bus.wire.subscribe(subject.at(self.id).name, self._hear(subject, handler))

    async def start(self) -> Rank:
        await self.listen()
        await self.ranks.start(self.engine)
        return self

    def _hear(self, subject: Subject[Any, Any], handler: Handler) -> Callable[[Delivery], None]:
        def on_delivery(delivery: Delivery) -> None:
            if not self.is_deaf:
                self._here.spawn(self._handle(handler, decoder(subject.message).decode(delivery.body)))

        return on_delivery

    async def _handle(self, handler: Handler, message: Message) -> None:
        try:
            await handler(message, ANY)
        except GroupLost as error:
            self.errors.append(error)

    def _on_called(self) -> None:
        self.num_called += 1

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(self._here.spawn(work))
        return self.tasks[-1]

    def begin(self) -> tuple[asyncio.Future[str], asyncio.Task[str]]:
        """A step, which lasts until its future is done."""
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return work, asyncio.create_task(self.ranks.step(work))

    async def step(self) -> None:
        """One that the others have come to."""
        work, stepping = self.begin()
        await asyncio.sleep(0)
        self.member.num_steps += 1
        work.set_result("")
        await stepping

    @property
    def is_idle(self) -> bool:
        return all(task.done() for task in self.tasks)


async def overhear(here: Place) -> list[tuple[str, Message]]:
    """All that is said from now on."""
    said: list[tuple[str, Message]] = []
    kinds: dict[str, type[Message]] = {
        "step": StepWanted,
        "present": RankPresent,
        "meet": MeetRanks,
        "place": PlaceExperts,
        EXPERTS.at(Role.DECODE).name.rpartition(".")[2]: ExpertsUsed,
        BROKEN.at(Role.DECODE).name.rpartition(".")[2]: GroupBroken,
    }

    def on_delivery(delivery: Delivery) -> None:
        kind = next(kind for word, kind in kinds.items() if word in delivery.subject.split("."))
        said.append((delivery.subject, decoder(kind).decode(delivery.body)))

    await (await here.bus()).wire.subscribe("shoal.>", on_delivery)
    return said


Scene = Callable[[Place, Rank, Rank, list[tuple[str, Message]]], Coroutine[Any, Any, None]]


def played(test: Scene) -> Callable[[], None]:
    """With two ranks that have met, at 100 s, and what is said from then on."""

    def run() -> None:
        async def main() -> None:
            async with place() as here:
                await asyncio.sleep(100)
                first, second = Rank(here, 0), Rank(here, 1)
                await first.listen()
                await asyncio.gather(first.ranks.start(first.engine), second.start())
                await asyncio.sleep(1)
                assert first.member.generation == second.member.generation > 0
                await test(here, first, second, await overhear(here))

        run_virtual(main())

    run.__name__ = test.__name__
    return run


@played
async def test_who_gets_work_calls_the_others_until_they_have_come(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    second.is_deaf = True
    work, stepping = first.begin()
    await asyncio.sleep(REPEAT_S / 2)
    assert said == [(STEP_DECODE.at("d-1").name, StepWanted(generation=first.member.generation, num_steps=0))]
    assert not second.ranks.is_called() and second.num_called == 0
    second.is_deaf = False  # the first call was lost
    await asyncio.sleep(REPEAT_S)
    assert second.ranks.is_called() and second.num_called == 1
    first.member.num_steps = second.member.num_steps = 1
    work.set_result("tokens")
    assert await stepping == "tokens"
    assert not second.ranks.is_called() and not first.ranks.is_called()
    num_said = len(said)
    await asyncio.sleep(3600)
    assert len(said) == num_said and first.is_idle and second.is_idle  # asleep: no message, no timer, nothing


@played
async def test_who_is_awake_or_was_called_calls_nobody(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    first.member.is_awake = True
    assert first.ranks.is_called()
    await first.step()
    await asyncio.sleep(1)
    assert said == []
    second.member.num_steps = 1
    work, stepping = second.begin()
    await asyncio.sleep(0.1)
    first.member.is_awake = False
    assert len(said) == 1 and first.ranks.is_called()
    await first.step()
    await asyncio.sleep(0.1)
    assert len(said) == 1  # the other one calls
    work.set_result("")
    await stepping


@played
async def test_a_call_of_another_generation_or_of_a_step_that_is_over_is_not_for_us(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    first.member.num_steps = 5
    now = first.member.generation
    for wanted in (StepWanted(generation=now - 1, num_steps=5), StepWanted(generation=now, num_steps=4)):
        await second.bus.tell(STEP_DECODE.at("d-0"), wanted)
    await asyncio.sleep(1)
    assert first.num_called == 0 and not first.ranks.is_called()
    await second.bus.tell(STEP_DECODE.at("d-0"), StepWanted(generation=now, num_steps=5))
    await asyncio.sleep(1)
    assert first.num_called == 1 and first.ranks.is_called()


@played
async def test_who_called_the_others_for_nothing_steps_with_them_all_the_same(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    work, stepping = first.begin()
    await asyncio.sleep(0.1)
    work.set_exception(ValueError("not such tokens"))
    with pytest.raises(ValueError):
        await stepping
    assert first.ranks.is_called() and second.ranks.is_called()
    await first.step()
    assert not first.ranks.is_called()


@played
async def test_all_ranks_report_at_the_same_steps_what_was_asked_for(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    first.member.is_awake = True  # so that it calls nobody
    for _ in range(REPORT_STEPS + 1):
        await first.step()
    await asyncio.sleep(1)
    ((subject, report),) = said
    assert subject == EXPERTS.at(Role.DECODE).name and isinstance(report, ExpertsUsed)
    assert (report.id, report.group, report.rank, report.size) == ("d-0", "d-0", 0, 2)
    assert (report.generation, report.num_steps, report.version) == (first.member.generation, REPORT_STEPS, 0)
    assert [np.frombuffer(used, "<u4").tolist() for used in report.used] == [[REPORT_STEPS, 0, 0, 7], [0, 3]]
    assert [np.frombuffer(places, "<u2").tolist() for places in report.places] == [[0, 1, 2, 3], [0, 1]]


@played
async def test_ranks_that_are_left_meet_before_the_error_of_a_step_goes_on(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    first.member.is_awake = True
    work, stepping = first.begin()
    work.set_exception(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="memory"):
        await stepping
    assert said == []  # whatever that was, the others are there
    second.is_deaf, first.member.is_broken, former = True, True, first.member.generation
    work, stepping = first.begin()
    work.set_exception(RuntimeError("rank 1 is silent"))
    await asyncio.sleep(AGAIN_S / 2)
    assert not stepping.done() and {type(message) for _, message in said} == {RankPresent}
    assert first.ranks.detail()["group_size"] == 0  # nobody steps
    with pytest.raises(RuntimeError, match="silent"):
        await stepping
    assert (first.member.rank, first.member.size) == (0, 1) and first.member.generation > former
    assert first.ranks.detail()["group_size"] == 1
    broken = [message for _, message in said if isinstance(message, GroupBroken)]
    reason = "the others have met without it"
    expected = GroupBroken(Role.DECODE, id="d-0", group="d-0", ranks=["d-1"], reason=reason, generation=former)
    assert broken == [expected]
    del said[:]
    await asyncio.sleep(2.5 * INVITE_S)
    invitation = RankPresent(id="d-0", life=100, generation=first.member.generation, is_waiting=False)
    assert said == [(PRESENT_DECODE.at("d-1").name, invitation)] * 3


@played
async def test_a_rank_that_comes_back_is_met_at_the_next_step(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    """It was left out, as a process that stood still, and hears that the others are a group without it."""
    second.is_deaf = first.member.is_broken = True
    work, stepping = first.begin()
    work.set_exception(RuntimeError("rank 1 is silent"))
    with pytest.raises(RuntimeError, match="silent"):
        await stepping
    second.is_deaf, former = False, first.member.generation
    await asyncio.sleep(2 * INVITE_S)
    assert second.member.is_abandoned and second.ranks.is_called() and not first.ranks.is_called()
    second.member.is_broken = True
    work, parting = second.begin()
    work.set_exception(RuntimeError("it has left"))
    assert not first.ranks.is_called()
    await asyncio.sleep(GROW_S + 2 * PRESENT_S)
    assert first.member.is_called_off and first.ranks.is_called() and not parting.done()
    first.member.is_broken = True
    work, stepping = first.begin()
    work.set_exception(RuntimeError("all leave"))
    for one in (parting, stepping):
        with pytest.raises(RuntimeError, match="leave|left"):
            await one
    assert first.member.size == second.member.size == 2
    assert first.member.generation == second.member.generation > former
    assert not first.ranks.is_called() and not second.ranks.is_called()
    del said[:]
    await asyncio.sleep(2 * INVITE_S)
    assert said == [] and first.is_idle and second.is_idle  # nobody is missing


@played
async def test_a_call_that_comes_while_ranks_meet_is_not_for_the_next_time(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    second.is_deaf = first.member.is_broken = True
    first.member.meets.clear()
    for _ in range(2):
        work, stepping = first.begin()
        work.set_exception(RuntimeError("rank 1 is silent"))
        await first.member.meets.wait()
        first.member.meets.clear()
        former = first.ranks.generation
        call = MeetRanks(generation=1 << 62, ids=["d-1", "d-0"], lives=[50, 100], address="")
        await second.bus.tell(MEET_DECODE.at("d-0"), call)
        with pytest.raises(RuntimeError, match="silent"):
            await stepping
        assert former < first.member.generation != 1 << 62 and first.member.size == 1
        first.member.is_broken = True


@played
async def test_who_cannot_be_met_is_tried_ever_more_seldom(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    """And it does not keep the other one from its steps."""
    second.is_deaf = first.member.is_broken = True
    await fail_step(first)
    generation = first.member.generation
    present = RankPresent(id="d-1", life=51, generation=0, is_waiting=True)
    waiting = here.spawn(repeat(second.bus, PRESENT_DECODE, ["d-0"], present, PRESENT_S))
    for num_failed in range(8):
        await asyncio.sleep(min(GROW_S * 2**num_failed, MOST_GROW_S) - 0.1)
        assert [first.member.is_called_off] == [False]
        await asyncio.sleep(0.2 + PRESENT_S)
        assert first.member.is_called_off
        first.member.is_broken, first.member.errors = True, [RuntimeError("not all have come")]
        await fail_step(first)
        assert first.member.size == 1 and first.member.generation > generation
    waiting.cancel()
    first.member.is_broken = True
    await fail_step(first)
    assert first.ranks._meetings is not None and first.ranks._meetings._grow_s == GROW_S


async def fail_step(rank: Rank) -> None:
    """Behind it those that are there have met."""
    work, stepping = rank.begin()
    work.set_exception(RuntimeError("a rank is silent"))
    with pytest.raises(RuntimeError, match="silent"):
        await stepping


@played
async def test_of_whose_end_there_is_word_is_not_waited_for(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    """And a plan that was being carried out is none any more."""
    place = PlaceExperts(generation=first.member.generation, version=4, places=[b"\3\0\2\0\1\0\0\0"])
    await second.bus.tell(PLACE_DECODE.at("d-0"), place)
    await asyncio.sleep(0.1)
    placing = first.tasks[-1]
    second.is_deaf = first.member.is_broken = True
    work, stepping = first.begin()
    work.set_exception(RuntimeError("rank 1 is silent"))
    await asyncio.sleep(0.17)
    await first.ranks.events({})[EXITED_EARLY](ProcessExited(name="n", pid=1, members=["decode/d-1"]), ANY)
    await asyncio.sleep(0.051)  # what a meeting takes
    assert stepping.done() and first.member.size == 1 and placing.cancelled()
    with pytest.raises(RuntimeError, match="silent"):
        await stepping


@played
async def test_a_meeting_that_fails_is_followed_by_another_and_what_goes_wrong_here_is_an_end(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    former = first.member.generation
    for rank in (first, second):
        rank.member.is_broken = True
    first.member.errors = [RuntimeError("not all have come")]
    steppings = []
    for rank in (first, second):
        work, stepping = rank.begin()
        work.set_exception(RuntimeError("all leave"))
        steppings.append(stepping)
    await asyncio.sleep(0.01)
    second.member.is_broken = False
    second.member.errors = [RuntimeError("out of memory")]
    with pytest.raises(RuntimeError, match="memory"):
        await steppings[1]
    with pytest.raises(RuntimeError, match="all leave"):
        await steppings[0]
    assert first.ranks.generation == first.member.generation > former and not first.member.is_broken
    assert second.ranks.generation == former < second.member.generation


@played
async def test_a_group_asleep_hears_that_a_rank_has_ended_or_begun_anew_and_wakes_to_meet(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    handler = first.ranks.events({})[EXITED_EARLY]
    for members in (["prefill/d-1", "decode/d-9"], ["decode/d-0"]):  # a rank's own is of an earlier life
        await handler(ProcessExited(name="n", pid=1, members=members), ANY)
    for life in (50, 49):
        present = RankPresent(id="d-1", life=life, generation=0, is_waiting=True)
        await second.bus.tell(PRESENT_DECODE.at("d-0"), present)
    await asyncio.sleep(1)
    assert [first.member.is_abandoned, first.ranks.is_called()] == [False, False]
    await handler(ProcessExited(name="n", pid=1, members=["recipe/r", "decode/d-1"]), ANY)
    assert first.member.is_abandoned and first.ranks.is_called() and first.num_called == 1
    anew = RankPresent(id="d-0", life=101, generation=0, is_waiting=True)
    await first.bus.tell(PRESENT_DECODE.at("d-1"), anew)
    await asyncio.sleep(1)
    assert second.member.is_abandoned and second.ranks.is_called() and second.num_called == 1


def test_the_first_meeting_waits_for_who_has_ended_and_is_started_anew() -> None:
    async def main() -> None:
        async with place() as here:
            await asyncio.sleep(100)
            first, second = Rank(here, 0), Rank(here, 1)
            await first.listen()
            starting = here.spawn(first.ranks.start(first.engine))
            await asyncio.sleep(1)
            exited = ProcessExited(name="n", pid=1, members=["decode/d-1"])
            await first.ranks.events({})[EXITED_EARLY](exited, ANY)
            await asyncio.sleep(10)
            assert not starting.done()
            await asyncio.gather(starting, second.start())
            assert first.member.generation == second.member.generation > 0

    run_virtual(main())


def test_too_few_ranks_end() -> None:
    async def main() -> None:
        async with place() as here:
            await asyncio.sleep(100)
            first, second = Rank(here, 0, least=2), Rank(here, 1, least=2)
            await first.listen()
            await asyncio.gather(first.ranks.start(first.engine), second.start())
            said = await overhear(here)
            second.is_deaf = first.member.is_broken = True
            work, stepping = first.begin()
            work.set_exception(RuntimeError("rank 1 is silent"))
            await asyncio.sleep(GIVE_UP_S - 1)
            assert not stepping.done()
            with pytest.raises(GroupLost, match="decode d-0: too few ranks are left"):
                await stepping
            broken = [message for _, message in said if isinstance(message, GroupBroken)]
            assert [one.ranks for one in broken] == [["d-0"]]

    run_virtual(main())


@played
async def test_experts_are_placed_by_the_newest_plan_of_this_generation(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    async def tell(version: int, *, age: int = 0, places: bytes = b"\3\0\2\0\1\0\0\0") -> None:
        place = PlaceExperts(generation=first.member.generation - age, version=version, places=[places])
        await second.bus.tell(PLACE_DECODE.at("d-0"), place)
        await asyncio.sleep(1)

    first.member.version = 3
    await tell(5, age=1)
    await tell(3)
    assert first.member.moved == []
    await tell(4)
    await tell(4)  # again, as others may not have heard it
    assert first.member.moved == [(4, [[[3, 2], [1, 0]]])]
    await tell(6)
    assert [version for version, _ in first.member.moved] == [4, 6]
    first.member.is_broken = True
    await tell(7)
    first.member.is_broken = False
    first.member.may_move.set()
    await asyncio.sleep(1)
    assert first.member.version == 6 and first.is_idle and first.tasks[-2].cancelled()


def test_a_rank_that_cannot_carry_out_a_plan_ends_as_no_later_one_would_be_either() -> None:
    async def scene(here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]) -> None:
        place = PlaceExperts(generation=first.member.generation, version=13, places=[b"\3\0\2\0\1\0\0\0"])
        await second.bus.tell(PLACE_DECODE.at("d-0"), place)
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="no such places"):
        played(scene)()


def test_without_a_group_a_step_is_a_step() -> None:
    async def main() -> None:
        async with place() as here:
            said = await overhear(here)
            engine = FakeEngine(0)
            engine.member = None  # type: ignore[assignment]
            ranks = Ranks(await here.bus(), Role.DECODE, "d", None, here.spawn, lambda: None)
            assert ranks.handlers() == {}
            await ranks.start(engine)
            work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            work.set_result(3)
            assert await ranks.step(work) == 3 and not ranks.is_called()
            await asyncio.sleep(60)
            assert said == []

    run_virtual(main())
