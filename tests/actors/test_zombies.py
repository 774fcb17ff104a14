"""A process that was stopped, or cut off, and comes back: by then others have what it had, and nothing it does counts.

Worse than SIGSTOP: while it is away it goes on, and all that it has said, and was told, is heard when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.decode.actor import Decode
from actors.prefill.actor import Prefill
from bus.bus import Delivery
from bus.memory import MemoryWire, _Subscription
from bus.pulse import NUM_FIRST, STALL_S
from bus.subjects import BROKEN, EXITED
from kernels.timed import StepCost, TimedEngine
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.experts import GroupBroken
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancelled, Failed, Finished, FinishReason, Limits
from tests.actors.builders import submit
from tests.actors.cached import ask, cached, prompt
from tests.actors.core import Core, core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=20_000_000)
NUM_OUTPUT = 300


class Parting(RecordingBroker):
    """Keeps what the wires that are away say, and what is for them, until they are back."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[MemoryWire] = set()
        self._said: list[tuple[MemoryWire, Delivery]] = []
        self._for_them: list[tuple[_Subscription, Delivery]] = []

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if source in self.away:
            self._said.append((source, delivery))
            return
        super().publish(source, delivery)

    def _choose(self, matching: list[_Subscription]) -> list[_Subscription]:
        return [_Kept(one, self) if one.wire in self.away else one for one in super()._choose(matching)]

    def keep(self, subscription: _Subscription, delivery: Delivery) -> None:
        self._for_them.append((subscription, delivery))

    def back(self) -> None:
        self.away.clear()
        said, self._said = self._said, []
        heard, self._for_them = self._for_them, []
        for subscription, delivery in heard:
            asyncio.get_running_loop().call_soon(subscription.deliver, delivery)
        for source, delivery in said:
            super().publish(source, delivery)


class _Kept(_Subscription):
    """One whose wire is away."""

    def __init__(self, of: _Subscription, broker: Parting) -> None:
        super().__init__(of.wire, of.subject, of.queue, of.on_delivery)
        self._of, self._broker = of, broker

    def deliver(self, delivery: Delivery) -> None:
        self._broker.keep(self._of, delivery)


async def undisturbed(num_requests: int, *, num_tokens: int = 400) -> list[list[int]]:
    async with core(1, 1) as system:
        wanted = [ask(f"r{i}", prompt(num_tokens, i), NUM_OUTPUT) for i in range(num_requests)]
        return [(await system.finish(one))[0] for one in wanted]


async def finished(system: Core, num_requests: int) -> list[list[int]]:
    """The answers, which are whole."""
    names = [f"r{i}" for i in range(num_requests)]
    await asyncio.gather(*(system.listener.over(name).wait() for name in names))
    assert [system.listener.ends[name] for name in names] == [LENGTH] * num_requests
    return [system.listener.tokens[name] for name in names]


@pytest.mark.parametrize("victim", ["prefill/p0", "decode/d0"])
@pytest.mark.parametrize(("from_s", "away_s"), [(0.0, 5.0), (0.2, 5.0), (0.02, 30.0), (0.2, 300.0)])
def test_one_that_comes_back_writes_emits_and_frees_nothing_that_others_have(
    victim: str, from_s: float, away_s: float
) -> None:
    """Case 4: stopped for a second to five minutes, which nobody says."""

    async def main() -> None:
        expected = await undisturbed(4)
        broker = Parting()
        async with cached(broker=broker) as system:
            for i in range(4):
                await system.send(ask(f"r{i}", prompt(400, i), NUM_OUTPUT))
            await asyncio.sleep(from_s)
            broker.away.add(system.wires[victim])
            await asyncio.sleep(away_s)
            if away_s >= 30.0:
                assert not system.entrypoint.shard.num_live  # nobody waited for it
            broker.back()
            assert await finished(system, 4) == expected
            await system.settle(30.0)
            assert await quiet(system) == {}
            # What it stored, kept and dropped is as good as anybody's.
            for i in range(4):
                assert await system.run(ask(f"again{i}", prompt(400, i), NUM_OUTPUT)) == expected[i]

    run_virtual(main())


def test_one_said_to_have_ended_that_goes_on_is_told_to_let_go() -> None:
    async def main() -> None:
        async with core(1, 2, SLOW) as system:
            for i in range(4):
                await system.send(ask(f"r{i}", prompt(400, i), 590))
            await asyncio.sleep(1.0)
            for id in ("d0", "d1"):
                await tell_exit(system, f"decode/{id}")
            await asyncio.sleep(2.5)  # until balancers have heard of them again
            assert sum(len(one.slots) for one in system.actors.values() if isinstance(one, Decode)) == 4
            await finished(system, 4)
            assert system.entrypoint.shard.detail()["lost"] == 4
            assert await quiet(system, 5.0) == {}

    run_virtual(main())


def test_what_it_says_late_is_heard_by_nobody() -> None:
    """Not even where it would fit: its text is another one."""

    async def main() -> None:
        expected = await undisturbed(4)
        broker = Parting()
        async with core(1, 2, SLOW, broker) as system:
            for i in range(4):
                await system.send(ask(f"r{i}", prompt(400, i), NUM_OUTPUT))
            await asyncio.sleep(1.0)
            broker.away.add(system.wires["decode/d0"])
            zombie = system.actors["decode/d0"]
            assert isinstance(zombie, Decode) and isinstance(zombie._engine, TimedEngine) and len(zombie.slots)
            for generation in zombie.slots:
                zombie._engine._requests[generation.id].digest ^= 1
            await tell_exit(system, "decode/d0")
            await asyncio.sleep(0.7)
            broker.back()
            assert await finished(system, 4) == expected
            assert await quiet(system) == {}

    run_virtual(main())


async def tell_exit(system: Core, member: str, pid: int = 0) -> None:
    """Of its present process, unless told otherwise."""
    pid = pid or system.actors[member].bus.seams.pid
    await system.listener.bus.tell(EXITED.all(), ProcessExited(name="x", pid=pid, members=[member]))


@pytest.mark.parametrize("member", ["prefill/p0", "decode/d0"])
def test_word_of_an_end_that_comes_when_the_successor_is_there_takes_nothing_from_it(member: str) -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            await system.send(submit("r", num_tokens=600, max_tokens=NUM_OUTPUT))
            await asyncio.sleep(0.01 if "prefill" in member else 1.0)
            owner = next(system.entrypoint.shard.live()).owner
            assert owner is not None and f"{owner.role}/{owner.replica}" == member
            await tell_exit(system, member, pid=10**6)
            await system.listener.over("r").wait()
            assert system.listener.ends["r"] == LENGTH and system.entrypoint.shard.detail()["lost"] == 0

    run_virtual(main())


@pytest.mark.parametrize(("generation", "num_lost"), [(4, 0), (5, 1), (6, 1), (0, 1)])
def test_word_of_a_broken_group_takes_nothing_from_those_that_met_since(generation: int, num_lost: int) -> None:
    """Of one that survives, and breaks later, it does. Who does not say which one it was may mean this one."""

    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            await system.send(submit("r", max_tokens=NUM_OUTPUT))
            await asyncio.sleep(1.0)
            request = next(system.entrypoint.shard.live())
            request.life = request.life._replace(generation=5)
            reason = {"ranks": ["d0", "d1"], "reason": "silent", "generation": generation}
            broken = GroupBroken(role=Role.DECODE, id="d1", group="d0", **reason)  # type: ignore[arg-type]
            await system.listener.bus.tell(BROKEN.at(Role.DECODE), broken)
            await system.listener.over("r").wait()
            assert system.listener.ends["r"] == LENGTH and system.entrypoint.shard.detail()["lost"] == num_lost

    run_virtual(main())


# One whose engine hangs: its mailbox goes on


@pytest.mark.parametrize("victim", ["prefill/p0", "decode/d0"])
def test_a_replica_whose_engine_hangs_is_ended_and_its_requests_go_on_elsewhere(victim: str) -> None:
    async def main() -> None:
        expected = await undisturbed(4)
        async with core(2, 2, SLOW) as system:
            for i in range(2 * NUM_FIRST):
                await asyncio.gather(*(system.finish(submit(f"warm{i}.{j}")) for j in range(2)))
            actor, calls = system.actors[victim], list[float]()
            assert isinstance(actor, Decode | Prefill)

            async def hang(work: object) -> None:
                calls.append(asyncio.get_running_loop().time())
                await asyncio.get_running_loop().create_future()

            name = "decode" if isinstance(actor, Decode) else "prefill"
            setattr(actor._engine, name, hang)
            for i in range(4):
                await system.send(ask(f"r{i}", prompt(400, i), NUM_OUTPUT))
            assert await finished(system, 4) == expected
            assert calls and STALL_S - 1 < asyncio.get_running_loop().time() - calls[0] < STALL_S + 20
            assert system.wires[victim]._is_cut and await quiet(system) == {}

    run_virtual(main())


# What becomes of a lost one meanwhile


async def cancelled(system: Core) -> None:
    assert (await system.cancel("r")).was_running
    assert system.listener.ends["r"] == Cancelled()


async def overdue(system: Core) -> None:
    await asyncio.sleep(8.0)
    end = system.listener.ends["r"]
    assert isinstance(end, Failed) and end.failure.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("ended", [cancelled, overdue])
def test_one_that_waits_to_be_computed_anew_can_be_ended(ended: Callable[[Core], Awaitable[None]]) -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            limits = Limits(max_tokens=900, deadline_ns=int(9e9))
            await system.send(submit("r", limits=limits))
            await asyncio.sleep(1.0)
            system.kill("decode/d0")
            await tell_exit(system, "decode/d0")
            await asyncio.sleep(1.0)
            assert system.listener.tokens["r"] and not system.listener.ends
            await ended(system)
            assert await quiet(system, 5.0) == {}

    run_virtual(main())


def test_one_that_takes_its_replicas_with_it_does_not_take_all() -> None:
    """Case 3, 24: three are lost with it, and the others go on where they are."""

    async def main() -> None:
        (expected,) = await undisturbed(1)
        async with core(1, 4, SLOW) as system:
            await system.send(submit("bad", max_tokens=900))
            await asyncio.sleep(1.0)
            for _ in range(3):
                (owner,) = [one.owner for one in system.entrypoint.shard.live()]
                assert owner is not None
                system.kill(f"{owner.role}/{owner.replica}")
                await tell_exit(system, f"{owner.role}/{owner.replica}")
                await asyncio.sleep(1.0)
            end = system.listener.ends["bad"]
            assert isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST
            assert "3 replicas were lost that had the request" in end.failure.message
            assert (await system.finish(ask("r0", prompt(400, 0), NUM_OUTPUT)))[0] == expected
            assert await quiet(system) == {}

    run_virtual(main())


