"""A prefill replica knows what work costs, says how much it has, and shares its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from actors.prefill.actor import REPORT_S, Prefill
from actors.prefill.computing import measure
from actors.rules.cost import Work
from actors.rules.load import PrefillLoad
from actors.rules.meter import Meter
from bus.actor import HEARTBEAT_S
from bus.bus import Delivery, decoder
from bus.subjects import LOAD
from kernels.engine import Chunk
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.message import Role
from schemas.request import Finished, FinishReason, Limits
from schemas.routing import LoadReported, Route
from tests.actors.builders import submit
from tests.actors.core import VOCABULARY, Core, core, info, quiet
from tests.actors.prefixes import DecodeRoutes, stand, tokens

PUBLISHED = StepCost(step_ns=36_700_000, prefill_token_ns=50_500, decode_row_ns=1_000_000)
MILLION = 1_000_000


@dataclass
class Heard:
    """Load reports of prefill, with the time of each."""

    reports: list[tuple[float, LoadReported]]

    @property
    def last(self) -> PrefillLoad:
        return PrefillLoad.of(self.reports[-1][1].detail)


async def listen(system: Core) -> Heard:
    heard = Heard([])

    def on_delivery(delivery: Delivery) -> None:
        heard.reports.append((asyncio.get_running_loop().time(), decoder(LoadReported).decode(delivery.body)))

    await system.listener.bus.wire.subscribe(LOAD.at(Role.PREFILL).name, on_delivery)
    return heard


def prefill_of(system: Core) -> Prefill:
    prefill = system.actors["prefill/p0"]
    assert isinstance(prefill, Prefill)
    return prefill


class Control(TimedEngine):
    """The first and the last of its tokens are no text."""

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        if any(chunk.tokens.min() < 8 or chunk.tokens.max() >= self.info.vocab_size - 8 for chunk in chunks):
            raise ValueError("the image was not attached")
        return await super().prefill(chunks)


def test_dummy_prompts_are_of_text() -> None:
    meter = Meter()
    run_virtual(measure(Control(info(), VOCABULARY, PUBLISHED), meter))
    assert meter.cost.token_ns == pytest.approx(50_500, rel=0.05)


async def one_of_each(system: Core, cost: StepCost = PUBLISHED, **fields: int) -> None:
    await system.add_prefill("p0", TimedEngine(info(max_tokens=1 << 21, **fields), VOCABULARY, cost))
    await system.with_decode("d0", max_tokens=1 << 21, num_slots=64)


def test_before_it_serves_it_knows_what_work_costs_and_holds_nothing_of_that() -> None:
    async def main() -> None:
        async with core(0, 0) as system:
            await one_of_each(system, StepCost(step_ns=5_000_000, prefill_token_ns=20_000), max_step_tokens=4096)
            prefill, cost = prefill_of(system), prefill_of(system).batch.meter.cost
            assert cost.step_ns == pytest.approx(5_000_000, rel=0.01)
            assert cost.token_ns == pytest.approx(20_000, rel=0.01)
            assert cost.step_tokens == 4096
            report = prefill.load()
            assert PrefillLoad.of(report.detail) == PrefillLoad({}, cost)
            assert report.detail["computed_tokens"] == report.detail["queue_age_s"] == 0
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_long_prompt_is_foretold_with_the_steps_that_the_budget_makes_of_it() -> None:
    async def main() -> None:
        async with core(0, 0) as system:
            await one_of_each(system, max_step_tokens=16_384)
            foretold_s = prefill_of(system).batch.meter.cost.work_ns(Work(60_000)) / 1e9
            began_s = asyncio.get_running_loop().time()
            await system.finish(submit("r", num_tokens=60_000, max_tokens=1))
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(foretold_s, rel=0.03)

    run_virtual(main())


def test_what_is_left_is_reported_by_tenant_and_not_too_often() -> None:
    async def main() -> None:
        async with core(0, 0) as system:
            await one_of_each(system, max_step_tokens=4096)
            heard = await listen(system)
            began_s = asyncio.get_running_loop().time()
            for i, tenant in enumerate(["acme", "acme", "beta"]):
                await system.send(submit(f"r{i}", num_tokens=40_000, max_tokens=1, tenant=tenant))
            await asyncio.sleep(2 * REPORT_S)
            cost, left = prefill_of(system).batch.meter.cost, heard.last.remaining_ns
            assert set(left) == {"acme", "beta"} and left["beta"] < left["acme"] < 2 * 40_000 * cost.token_ns * 1.5
            assert heard.last.total_ns > 2e9 and heard.reports[-1][1].detail["cost_residual"] < 0.05
            await asyncio.gather(*(system.listener.over(f"r{i}").wait() for i in range(3)))
            took_s = asyncio.get_running_loop().time() - began_s
            assert len(heard.reports) <= took_s / REPORT_S + took_s / HEARTBEAT_S + 2
            left_ns = [PrefillLoad.of(report.detail).total_ns for _, report in heard.reports]
            assert len(left_ns) > 6 and left_ns[3:] == sorted(left_ns[3:], reverse=True)
            await asyncio.sleep(REPORT_S)
            assert heard.last.remaining_ns == {}

    run_virtual(main())


def test_who_waits_for_decode_has_no_work_left() -> None:
    async def main() -> None:
        async with core(1, 0) as system:
            heard = await listen(system)
            await system.send(submit("r1", num_tokens=600))
            await asyncio.sleep(3.0)
            report = heard.reports[-1][1]
            assert heard.last.remaining_ns == {} and len(report.reservations) == 1
            assert report.detail["handing_over"] == 1
            await system.cancel("r1")

    run_virtual(main())


def test_a_cancel_before_the_first_token_gives_its_quota_back_within_a_step() -> None:
    async def main() -> None:
        async with core(0, 0) as system:
            await one_of_each(system, max_step_tokens=4096)
            heard = await listen(system)
            await system.send(submit("chat", num_tokens=60_000, max_tokens=1))
            await system.send(submit("gone", num_tokens=60_000, tenant="acme"))
            await asyncio.sleep(1.05)
            assert heard.last.remaining_ns["acme"] > 0 and len(heard.reports[-1][1].reservations) == 2
            cancelled_s = asyncio.get_running_loop().time()
            assert (await system.cancel("gone")).was_running
            while "acme" in heard.last.remaining_ns:
                await asyncio.sleep(0.001)
            step_s, late_s = 0.25, asyncio.get_running_loop().time() - cancelled_s
            assert late_s <= step_s + REPORT_S and len(heard.reports[-1][1].reservations) == 1
            assert prefill_of(system).batch.get("gone") is None

    run_virtual(main())


class SlowToExport(TimedEngine):
    async def export(self, key: str) -> bytes:
        await asyncio.sleep(1.0)
        return await super().export(key)


def test_a_cancel_while_its_state_is_exported_asks_decode_for_nothing() -> None:
    async def main() -> None:
        async with core(0, 1) as system:
            await system.add_prefill("p0", SlowToExport(info(), VOCABULARY))
            decode = system.actors["decode-balancer/db0"]
            before = vars(decode)["_next_reservation"]
            await system.send(submit("r1", num_tokens=100))
            await asyncio.sleep(0.5)
            assert (await system.cancel("r1")).was_running
            assert await quiet(system) == {}
            assert vars(decode)["_next_reservation"] == before

    run_virtual(main())


def test_decode_is_asked_for_room_by_tenant_and_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        asked: list[Route] = []
        on_route = DecodeRoutes._on_route

        async def spy(self: DecodeRoutes, route: Route, envelope: object) -> object:
            asked.append(route)
            return await on_route(self, route, envelope)  # type: ignore[arg-type]

        monkeypatch.setattr(DecodeRoutes, "_on_route", spy)
        async with stand() as system:
            limits = Limits(max_tokens=33, deadline_ns=10**12)
            await system.finish("r1", tokens(300), None, tenant="acme", limits=limits)
        wanted = Route(request_id="r1", num_new=33, num_cached=300, deadline_ns=10**12, tenant="acme")
        assert asked == [wanted]

    run_virtual(main())


async def chat(system: Core, num: int, seed: int) -> list[float]:
    """How long each of so many chats waited for its first and only token: about half of what the replica can do."""
    draw, loop = np.random.default_rng(seed), asyncio.get_running_loop()
    sizes = np.clip(draw.lognormal(6.9, 0.8, num), 50, 8000).astype(int)
    waits = draw.exponential(0.14, num)

    async def one(number: int) -> float:
        began_s = loop.time()
        _, end = await system.finish(submit(f"c{number}", num_tokens=int(sizes[number]), max_tokens=1))
        assert end == Finished(reason=FinishReason.LENGTH)
        return loop.time() - began_s

    running = []
    for number in range(num):
        await asyncio.sleep(waits[number].item())
        running.append(asyncio.create_task(one(number)))
    return await asyncio.gather(*running)


def test_a_million_tokens_amid_chat_do_not_make_it_wait_half_as_long_again() -> None:
    async def run(is_amid: bool) -> tuple[float, bool]:
        async with core(0, 0) as system:
            await one_of_each(system, max_step_tokens=16_384, num_slots=16)
            if is_amid:
                prompt = await system.bulks["entrypoint/e0"].wrap(bytes(4 * MILLION))
                assert isinstance(prompt, Payload)
                await system.send(submit("long", num_tokens=MILLION, max_tokens=1, prompt=prompt))
                await asyncio.sleep(1.0)
            waited_s = await chat(system, 250, seed=5)
            return float(np.percentile(waited_s, 99)), prefill_of(system).batch.get("long") is not None

    async def main() -> None:
        p99_s, _ = await run(False)
        amid_s, is_still_there = await run(True)
        assert is_still_there, "it was there all the time"
        assert amid_s <= 1.5 * p99_s, f"{amid_s} s, and {p99_s} s without it"

    run_virtual(main())


