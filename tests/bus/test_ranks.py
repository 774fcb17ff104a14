"""A rank's side of its group: who is called when, what is told to whom, and that a group asleep is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.actor import Envelope, Handler
from bus.bus import Delivery, decoder
from bus.ranks import REPEAT_S, REPORT_STEPS, GroupLost, GroupOf, Ranks
from bus.subjects import BEGIN_DECODE, BROKEN, EXITED, EXPERTS, PLACE_DECODE, STEP_DECODE, Subject
from run.virtual import run_virtual
from schemas.experts import ExpertsUsed, GroupBroken, PlaceExperts, RankStarted, StepWanted
from schemas.liveness import ProcessExited
from schemas.message import Message, Role
from tests.bus.members import Place, place

IDS = ("d-0", "d-1")
LIVES = (100, 50)
PLACES = [np.array([[0, 1], [2, 3]]), np.array([[0], [1]])]


class FakeMember:
    """Of an engine that steps when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.lives = rank, len(IDS), LIVES
        self.num_steps = self.version = 0
        self.is_awake = self.is_broken = False
        self.places = PLACES
        self.moved: list[tuple[int, list[Any]]] = []
        self.may_move = asyncio.Event()

    @property
    def generation(self) -> int:
        return self.lives[0]

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

    def __init__(self, here: Place, rank: int) -> None:
        self.id, self.engine, self.member = IDS[rank], FakeEngine(rank), FakeMember(rank)
        self.member = self.engine.member
        self.num_called = 0
        self.is_deaf = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[Exception] = []
        self._here, self._life = here, LIVES[rank]

    async def listen(self) -> None:
        self.bus = await self._here.bus()
        self.ranks = Ranks(self.bus, Role.DECODE, self.id, GroupOf(IDS, self._life), self._spawn, self._on_called)
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
        "begin": RankStarted,
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
    """With two ranks that have met, and what is said from then on."""

    def run() -> None:
        async def main() -> None:
            async with place() as here:
                first, second = await Rank(here, 0).start(), await Rank(here, 1).start()
                await asyncio.sleep(1)
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
    assert said == [(STEP_DECODE.at("d-1").name, StepWanted(generation=100, num_steps=0))]
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
    for wanted in (StepWanted(generation=99, num_steps=5), StepWanted(generation=100, num_steps=4)):
        await second.bus.tell(STEP_DECODE.at("d-0"), wanted)
    await asyncio.sleep(1)
    assert first.num_called == 0 and not first.ranks.is_called()
    await second.bus.tell(STEP_DECODE.at("d-0"), StepWanted(generation=100, num_steps=5))
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
    assert (report.generation, report.num_steps, report.version) == (100, REPORT_STEPS, 0)
    assert [np.frombuffer(used, "<u4").tolist() for used in report.used] == [[REPORT_STEPS, 0, 0, 7], [0, 3]]
    assert [np.frombuffer(places, "<u2").tolist() for places in report.places] == [[0, 1, 2, 3], [0, 1]]


@played
async def test_a_broken_group_is_told_once_before_the_error_goes_on(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    first.member.is_awake = True
    work, stepping = first.begin()
    work.set_exception(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="memory"):
        await stepping
    assert said == []  # whatever that was, the others are there
    first.member.is_broken = True
    work, stepping = first.begin()
    order: list[str] = []
    stepping.add_done_callback(lambda _: order.append("error"))
    told = first.bus.tell

    async def tell(*args: Any) -> None:
        order.append("told")
        await told(*args)

    first.bus.tell = tell  # type: ignore[method-assign]
    work.set_exception(RuntimeError("rank 1 is silent"))
    with pytest.raises(RuntimeError, match="silent"):
        await stepping
    assert order == ["told", "error"]
    await second.bus.tell(BEGIN_DECODE.at("d-0"), RankStarted(id="d-1", life=51))
    await asyncio.sleep(1)
    what, now = "rank 1 is silent", first.member.generation
    broken = GroupBroken(Role.DECODE, id="d-0", group="d-0", ranks=["d-0", "d-1"], reason=what, generation=now)
    assert now > 0
    assert [message for subject, message in said if subject == BROKEN.at(Role.DECODE).name] == [broken]


@played
async def test_a_rank_that_starts_anew_is_the_end_of_the_group(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    for started in (RankStarted(id="d-1", life=50), RankStarted(id="d-1", life=49), RankStarted(id="d-9", life=99)):
        await second.bus.tell(BEGIN_DECODE.at("d-0"), started)
    await asyncio.sleep(1)
    assert first.errors == []
    await second.bus.tell(BEGIN_DECODE.at("d-0"), RankStarted(id="d-1", life=51))
    await asyncio.sleep(1)
    assert len(first.errors) == 1 and isinstance(said[-1][1], GroupBroken)


@played
async def test_who_starts_says_so_until_all_have_met(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    anew = Rank(here, 1)
    anew.engine.may_start.clear()
    await anew.listen()
    starting = asyncio.create_task(anew.ranks.start(anew.engine))
    await asyncio.sleep(REPEAT_S * 2.5)
    assert said == [(BEGIN_DECODE.at("d-0").name, RankStarted(id="d-1", life=50))] * 3
    assert not anew.ranks.is_called() and anew.errors == []
    await first.bus.tell(BEGIN_DECODE.at("d-1"), RankStarted(id="d-0", life=100))  # as it starts as well
    anew.engine.may_start.set()
    await starting
    await asyncio.sleep(60)
    assert len(said) == 4 and anew.is_idle and anew.errors == []


@played
async def test_experts_are_placed_by_the_newest_plan_of_this_generation(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    async def tell(version: int, generation: int = 100, places: bytes = b"\3\0\2\0\1\0\0\0") -> None:
        place = PlaceExperts(generation=generation, version=version, places=[places])
        await second.bus.tell(PLACE_DECODE.at("d-0"), place)
        await asyncio.sleep(1)

    first.member.version = 3
    await tell(5, generation=99)
    await tell(3)
    assert first.member.moved == []
    await tell(4)
    await tell(4)  # again, as others may not have heard it
    assert first.member.moved == [(4, [[[3, 2], [1, 0]]])] and len(first.tasks) == 2
    await tell(6)
    assert [version for version, _ in first.member.moved] == [4, 6]
    first.member.may_move.set()
    await asyncio.sleep(1)
    assert first.member.version == 6 and first.is_idle and first.tasks[-2].cancelled()


def test_a_rank_that_cannot_carry_out_a_plan_ends_as_no_later_one_would_be_either() -> None:
    async def scene(here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]) -> None:
        place = PlaceExperts(generation=100, version=13, places=[b"\3\0\2\0\1\0\0\0"])
        await second.bus.tell(PLACE_DECODE.at("d-0"), place)
        await asyncio.sleep(1)
        assert [type(message) for _, message in said] == [PlaceExperts, GroupBroken]

    with pytest.raises(ValueError, match="no such places"):
        played(scene)()


@played
async def test_a_process_that_ended_is_the_end_of_its_group(
    here: Place, first: Rank, second: Rank, said: list[tuple[str, Message]]
) -> None:
    heard: list[ProcessExited] = []

    async def known(exited: ProcessExited, envelope: Envelope) -> None:
        heard.append(exited)

    handler = first.ranks.events({EXITED.all(): known})[EXITED.all()]
    for members in (["prefill/d-1", "decode/d-9"], ["decode/d-0"]):  # a rank's own is of an earlier life
        await handler(ProcessExited(name="n", pid=1, members=members), ANY)
    with pytest.raises(GroupLost, match="decode d-1 has ended"):
        await handler(ProcessExited(name="n", pid=1, members=["recipe/r", "decode/d-1"]), ANY)
    await asyncio.sleep(1)
    assert len(heard) == 3
    assert [type(message) for _, message in said] == [GroupBroken]


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
