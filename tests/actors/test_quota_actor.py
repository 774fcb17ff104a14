"""Quota actors and who asks them, over a bus that loses messages, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.quota.actor import Quota
from actors.recipe.shards import Shards
from actors.rules.owner import choose
from actors.rules.tenants import Tenants
from bus.bus import Bus, BusError, Delivery, decoder
from bus.limits import PATIENCE_S, AnyQuota
from bus.memory import MemoryWire
from bus.subjects import LOAD, report_load
from run.simulator import RecordingBroker, World
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.message import Role
from schemas.quota import AdmitCall
from schemas.routing import LoadReported, ReportLoad

TENANTS = Tenants.parse("[tenants.a]\nrequests_per_minute = 2\ntokens_per_minute = 100", "t.toml")


class Losing(RecordingBroker):
    """Loses the messages that `is_lost` says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost: Callable[[Delivery], bool] = lambda delivery: False

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if not self.is_lost(delivery):
            super().publish(source, delivery)


class Town:
    """Quota actors, and one who asks them as a recipe does."""

    def __init__(self) -> None:
        self.broker = Losing()
        self.world = World(1, self.broker)
        self.bus: Bus
        self.any: AnyQuota
        self._members = Shards()

    @classmethod
    async def build(cls, *ids: str) -> Town:
        town = cls()
        town.bus = await town.world.bus("asker")
        town.any = AnyQuota(town.bus, lambda tenant, tried: town._members.owner(tenant, tried, now_s()))
        await town.bus.wire.subscribe(LOAD.at(Role.QUOTA).name, town._on_load)
        for id in ids:
            await town.add(id)
        await town.bus.tell(report_load(Role.QUOTA).all(), ReportLoad())
        return town

    async def add(self, id: str) -> None:
        await self.world.add(Quota(id, await self.world.bus(f"quota/{id}"), TENANTS))

    def _on_load(self, delivery: Delivery) -> None:
        report: LoadReported = decoder(LoadReported).decode(delivery.body)
        self._members.saw(report, now_s())

    async def ask(self, id: str, num_tokens: int = 1, tenant: str = "a") -> None:
        await self.any.admit(AdmitCall(tenant=tenant, request_id=id, num_prompt_tokens=num_tokens), lambda: False)

    async def refused(self, id: str, num_tokens: int = 1) -> float:
        """It is refused; the wait that is said."""
        with pytest.raises(BusError) as caught:
            await self.ask(id, num_tokens)
        assert caught.value.code is Code.RATE_LIMITED and not self.any.is_asked(id)
        assert f"retry in {-(-caught.value.failure.retry_after_s // 1):.0f} s" in caught.value.failure.message
        return caught.value.failure.retry_after_s


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_refusal_says_when_to_come_again() -> None:
    async def main() -> None:
        town = await Town.build("q0")
        await town.ask("1")
        await town.ask("2")
        wait_s = await town.refused("3")
        assert 29 < wait_s <= 30
        await asyncio.sleep(wait_s - 0.01)
        assert await town.refused("3") == pytest.approx(0.01)
        await asyncio.sleep(0.01 + 1e-6)
        await town.ask("3")
        await town.ask("1", tenant="public")
        await town.world.stop()

    run_virtual(main())


@pytest.mark.parametrize("what", ["question", "answer"])
def test_what_is_lost_is_asked_again_and_charged_once(what: str) -> None:
    async def main() -> None:
        town = await Town.build("q0")
        start_s, replies, lost = now_s(), set[str](), list[Delivery]()

        def is_lost(delivery: Delivery) -> bool:
            is_question = delivery.subject.endswith(".admit")
            if is_question:
                replies.add(delivery.reply)
            if len(lost) == 2 or not (is_question if what == "question" else delivery.subject in replies):
                return False
            lost.append(delivery)
            return True

        town.broker.is_lost = is_lost
        await town.ask("1", 60)
        assert len(lost) == 2 and now_s() - start_s >= 10
        town.broker.is_lost = lambda delivery: False
        await town.ask("2", 40)
        await town.any.end("2", 0)
        await town.world.stop()

    run_virtual(main())


def test_output_is_told_until_it_is_heard_and_counted_once() -> None:
    async def main() -> None:
        town = await Town.build("q0")
        await town.ask("1", 100)
        lost = list[str]()

        def is_lost(delivery: Delivery) -> bool:
            if delivery.subject.endswith(".used") or delivery.subject in lost:
                lost.append(delivery.reply)
                return len(lost) in (1, 3)  # the first question, and the answer to the second
            return False

        town.broker.is_lost = is_lost
        await town.any.end("1", 100)
        assert len(lost) == 5
        # After so long 100 tokens are due, and of the debt not more than ten seconds' worth is paid.
        assert 60 - 12 < await town.refused("2") <= 60
        assert not town.any.is_asked("1")
        await town.any.end("1", 1000)
        await town.world.stop()

    run_virtual(main())


def test_who_owns_a_tenant_is_gone_and_another_takes_over() -> None:
    async def main() -> None:
        town = await Town.build("q0", "q1")
        owner = choose("a", ["q0", "q1"])
        await town.ask("1")
        await town.ask("2")
        await town.refused("3")
        town.world.kill(f"quota/{owner}")
        await asyncio.sleep(0)
        start_s = now_s()
        await town.ask("3")
        assert now_s() - start_s < 1
        await town.any.end("3", 1)
        await town.any.end("1", 1)  # who let it in is gone: nobody is told
        await town.world.stop()

    run_virtual(main())


def test_a_restart_is_waited_for_and_fills_the_buckets() -> None:
    async def main() -> None:
        town = await Town.build("q0")
        await town.ask("1", 100)
        town.world.kill("quota/q0")
        asking = asyncio.create_task(town.ask("2", 100))
        await asyncio.sleep(PATIENCE_S - 3)
        assert not asking.done()
        await town.add("q0")
        await asking
        await town.world.stop()

    run_virtual(main())


def test_a_limit_that_nobody_keeps_is_not_let_pass() -> None:
    async def main() -> None:
        town = await Town.build()
        start_s = now_s()
        with pytest.raises(BusError) as caught:
            await town.ask("1")
        assert caught.value.code is Code.NO_REPLICA
        assert PATIENCE_S <= now_s() - start_s < PATIENCE_S + 1

    run_virtual(main())


def test_nobody_waits_for_a_cancelled_request() -> None:
    async def main() -> None:
        town, gone = await Town.build(), asyncio.Event()
        call = AdmitCall(tenant="a", request_id="1", num_prompt_tokens=1)
        asking = asyncio.create_task(town.any.admit(call, gone.is_set))
        await asyncio.sleep(1)
        gone.set()
        with pytest.raises(BusError) as caught:
            await asking
        assert caught.value.code is Code.CANCELLED and now_s() < 2

    run_virtual(main())


def test_a_request_that_ends_while_its_word_is_out_is_refused_in_peace() -> None:
    async def main() -> None:
        town = await Town.build("q0")
        await town.ask("1")
        await town.ask("2")
        asking = asyncio.create_task(town.ask("3"))
        await asyncio.sleep(0)
        assert town.any.is_asked("3")
        await town.any.end("3", 0)
        with pytest.raises(BusError) as caught:
            await asking
        assert caught.value.code is Code.RATE_LIMITED and not town.any.is_asked("3")
        await town.world.stop()

    run_virtual(main())
