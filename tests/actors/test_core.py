"""A request through entrypoint, balancers, prefill and decode, and every way it can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from actors.decode.actor import Decode
from actors.prefill.actor import Prefill
from bus.bulk import MemoryBulk
from bus.bus import BusError
from bus.subjects import DISPATCH, TOKENS
from kernels.timed import StepCost
from run.virtual import run_virtual
from schemas.bulk import Handle, Payload
from schemas.failure import Code
from schemas.handover import Dispatched
from schemas.request import Cancelled, CancelReason, Failed, Finished, FinishReason, Limits, Sampling, TokensEmitted
from tests.actors.builders import dispatch as build_dispatch
from tests.actors.builders import prompt_bytes, submit
from tests.actors.core import core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=10_000_000)


def test_a_request_ends_once_and_nothing_is_held() -> None:
    async def main() -> None:
        async with core() as system:
            tokens, end = await system.finish(submit("r1", num_tokens=300, max_tokens=12))
            assert len(tokens) == 12 and end == LENGTH
            assert await quiet(system) == {}

    run_virtual(main())


def test_the_same_tokens_alone_and_among_many_on_other_replicas() -> None:
    async def main() -> None:
        requests = [
            submit(
                f"r{i}",
                num_tokens=1 + 37 * i % 500,
                max_tokens=5 + i % 20,
                sampling=Sampling(temperature=i % 2, top_p=1.0, seed=i),
            )
            for i in range(64)
        ]
        async with core(1, 1, SLOW) as system:
            alone = [(await system.finish(request))[0] for request in requests]
        async with core(3, 3, SLOW) as system:
            together = await asyncio.gather(*(system.finish(request) for request in requests))
            assert [tokens for tokens, _ in together] == alone
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_prompt_too_long_for_a_message_travels_by_handle() -> None:
    async def main() -> None:
        async with core() as system:
            await system.with_prefill("big", max_tokens=400_000, max_step_tokens=100_000)
            await system.with_decode("big", max_tokens=400_000)
            system.kill("prefill/p0")
            system.kill("decode/d0")
            request = submit("r1", num_tokens=300_000, max_tokens=3)
            prompt = await system.bulks["entrypoint/e0"].wrap(request.prompt.inline)
            tokens, end = await system.finish(submit("r1", num_tokens=300_000, max_tokens=3, prompt=prompt))
            assert len(tokens) == 3 and end == LENGTH

    run_virtual(main())


def test_a_prompt_over_the_limit_is_a_typed_error() -> None:
    async def main() -> None:
        async with core() as system:
            tokens, end = await system.finish(submit("r1", num_tokens=1000))
            assert tokens == [] and isinstance(end, Failed) and end.failure.code is Code.CONTEXT_LENGTH
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize(("sent", "announced"), [(b"", 0), (b"", 5), (b"abc", 1), (b"abcdefgh", 1), (b"abcde", 1)])
def test_a_prompt_that_is_not_what_was_announced_takes_nobody_down(sent: bytes, announced: int) -> None:
    async def main() -> None:
        async with core() as system:
            dispatch = structs.replace(
                build_dispatch(), prompt=Payload(inline=sent), num_prompt_tokens=announced
            )
            with pytest.raises(BusError) as refused:
                await system.listener.bus.ask(DISPATCH.at("p0"), dispatch, timeout_s=5)
            assert refused.value.code is Code.INTERNAL
            assert (await system.finish(submit("r1")))[1] == LENGTH

    run_virtual(main())


@pytest.mark.parametrize("epoch", [4, 6])
def test_a_dispatch_is_one_with_another_by_its_epoch_only(epoch: int) -> None:
    """Of two with other epochs each has its reservation: whoever sent the one that is refused lets go of its own."""

    async def main() -> None:
        async with core(cost=SLOW) as system:
            bus = system.listener.bus
            for _ in range(2):
                assert isinstance(await bus.ask(DISPATCH.at("p0"), build_dispatch(epoch=5), timeout_s=5), Dispatched)
            with pytest.raises(BusError) as refused:
                await bus.ask(DISPATCH.at("p0"), build_dispatch(epoch=epoch), timeout_s=5)
            assert refused.value.code is Code.DUPLICATE_REQUEST

    run_virtual(main())


def test_tokens_of_nobody_take_no_entrypoint_down() -> None:
    async def main() -> None:
        async with core() as system:
            for source in ("", "decode", "nobody/d0", "decode/a.>"):
                emitted = TokensEmitted(
                    source=source, request_ids=["r"], epochs=[1], first_indexes=[0], counts=[1], tokens=[5]
                )
                with pytest.raises(BusError) as error:
                    await system.listener.bus.ask(TOKENS.at("e0"), emitted, timeout_s=5)
                assert error.value.code is Code.BAD_REQUEST
            await system.finish(submit("r1"))

    run_virtual(main())


def test_the_same_id_twice_at_once_is_refused_and_later_is_not() -> None:
    async def main() -> None:
        async with core(cost=SLOW) as system:
            await system.send(submit("r1"))
            with pytest.raises(BusError) as refused:
                await system.send(submit("r1", max_tokens=9))
            assert refused.value.code is Code.DUPLICATE_REQUEST
            await system.listener.over("r1").wait()

    run_virtual(main())


def test_the_same_message_twice_is_one_request() -> None:
    """Its sender had no answer to the first."""

    async def main() -> None:
        async with core(cost=SLOW) as system:
            await system.send(submit("r1"))
            await asyncio.sleep(0.02)
            await system.send(submit("r1"))
            await system.listener.over("r1").wait()
            assert len(system.listener.tokens["r1"]) == 8 and not system.listener.wrongs
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.015, 0.03, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("reason", list(CancelReason))
def test_cancel_at_any_time_frees_everything_within_a_step(delay_s: float, reason: CancelReason) -> None:
    async def main() -> None:
        async with core(2, 2, SLOW) as system:
            for i in range(8):
                await system.send(submit(f"r{i}", num_tokens=600, max_tokens=300))
            await asyncio.sleep(delay_s)
            for i in range(8):
                assert (await system.cancel(f"r{i}", reason)).was_running
                assert not (await system.cancel(f"r{i}", reason)).was_running
            loop = asyncio.get_running_loop()
            asked_s = loop.time()
            assert await quiet(system) == {}
            assert loop.time() - asked_s <= 0.05
            stopped = Finished(reason=FinishReason.STOP)
            expected = stopped if reason is CancelReason.STOP_SEQUENCE else Cancelled()
            assert list(system.listener.ends.values()) == [expected] * 8

    run_virtual(main())


@pytest.mark.parametrize("delay_s", [0.001, 0.012, 0.02, 0.03, 0.04, 0.2])
def test_an_id_can_be_used_again_at_once_after_a_cancel(delay_s: float) -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            expected = (await system.finish(submit("truth", num_tokens=200, max_tokens=7)))[0]
            for _ in range(5):
                await system.send(submit("r1", num_tokens=300, max_tokens=500))
                await asyncio.sleep(delay_s)
                canceling = asyncio.create_task(system.cancel("r1"))
                await asyncio.sleep(0.0)
                while (known := system.entrypoint.shard.get("r1")) is None or known.end is None:
                    await asyncio.sleep(0.0001)
                await system.listener.over("r1").wait()
                system.listener.reset("r1")
                tokens, end = await system.finish(submit("r1", num_tokens=200, max_tokens=7))
                assert (tokens, end) == (expected, LENGTH)
                system.listener.reset("r1")
                await canceling
            assert not any(task.done() for task in system.tasks.values())
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_prompt_that_takes_long_to_pull_is_not_taken_for_lost() -> None:
    async def main() -> None:
        async with core() as system:
            bulk = system.bulks["prefill/p0"]
            pull = bulk.pull

            async def slow_pull(handle: Handle, *, timeout_s: float) -> bytes:
                await asyncio.sleep(6.0)
                return await pull(handle, timeout_s=timeout_s)

            bulk.pull = slow_pull  # type: ignore[method-assign]
            prompt = Payload(handle=system.bulks["entrypoint/e0"].offer(prompt_bytes(900), lease_s=60.0))
            system.bulks["entrypoint/e0"].wrap = refuse_inline(system.bulks["entrypoint/e0"])  # type: ignore
            tokens, end = await system.finish(submit("r1", num_tokens=900, max_tokens=3, prompt=prompt))
            assert end == LENGTH and len(tokens) == 3
            await system.send(submit("r2", num_tokens=900, max_tokens=3))
            await asyncio.sleep(1.0)
            assert (await system.cancel("r2")).was_running
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_lost_answer_to_dispatch_does_not_disturb_the_request() -> None:
    async def main() -> None:
        async with core(cost=StepCost(step_ns=20_000_000)) as system:
            prefill = system.actors["prefill/p0"]
            assert isinstance(prefill, Prefill)
            queue = prefill._queue

            def without_answer(*args: Any) -> None:
                queue(*args)

            prefill._queue = without_answer  # type: ignore[method-assign, assignment]
            started_s = asyncio.get_running_loop().time()
            tokens, end = await system.finish(submit("r1", max_tokens=900))
            assert end == LENGTH and len(tokens) == 900
            assert asyncio.get_running_loop().time() - started_s < 900 * 0.02 + 1.0

    run_virtual(main())


def refuse_inline(bulk: MemoryBulk) -> Callable[[bytes], Awaitable[Payload]]:
    """A `wrap` that offers everything by handle."""

    async def wrap(data: bytes) -> Payload:
        return Payload(handle=bulk.offer(data, lease_s=60.0))

    return wrap


def test_a_refused_long_prompt_leaves_no_offers_behind() -> None:
    async def main() -> None:
        async with core() as system:
            bulk = system.bulks["entrypoint/e0"]
            bulk.wrap = refuse_inline(bulk)  # type: ignore[method-assign]
            prefill = system.actors["prefill/p0"]
            await system.send(submit("warm"))
            await system.listener.over("warm").wait()
            prefill.is_draining = True  # as if the balancer had not heard of it yet
            await system.send(submit("r1"))
            await asyncio.sleep(5.0)
            assert bulk.num_offers <= 1
            prefill.is_draining = False
            await system.listener.over("r1").wait()
            assert await quiet(system) == {}

    run_virtual(main())


def test_cancel_reaches_a_state_on_offer_to_a_stopped_decode() -> None:
    async def main() -> None:
        async with core() as system:
            decode = system.actors["decode/d0"]
            assert isinstance(decode, Decode)

            async def hang(*_: object) -> None:
                await asyncio.Event().wait()

            decode._take = hang  # type: ignore[method-assign, assignment]
            await system.send(submit("r1"))
            await asyncio.sleep(1.0)
            await system.cancel("r1")
            await asyncio.sleep(0.2)
            held = system.held()
            assert held["prefill/p0"] == 0 and held["bulk of prefill/p0"] == 0

    run_virtual(main())


def test_a_decode_killed_with_an_offer_in_hand_is_found_out_soon() -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            decode = system.actors["decode/d0"]
            assert isinstance(decode, Decode)

            async def hang(*_: object) -> None:
                await asyncio.Event().wait()

            decode._take = hang  # type: ignore[method-assign, assignment]
            await system.send(submit("r1"))
            await asyncio.sleep(0.5)
            system.kill("decode/d0")
            await system.with_decode("d0", SLOW)  # as a supervisor would
            restarted_s = asyncio.get_running_loop().time()
            await system.listener.over("r1").wait()
            assert system.listener.ends["r1"] == LENGTH
            assert asyncio.get_running_loop().time() - restarted_s < 5.0

    run_virtual(main())


def test_a_recipe_that_vanished_frees_its_requests() -> None:
    async def main() -> None:
        async with core(cost=SLOW) as system:
            await system.send(submit("r1", max_tokens=900))
            await asyncio.sleep(0.5)
            system.kill("recipe/rc0")
            assert await quiet(system, 5.0) == {}

    run_virtual(main())


def test_the_deadline_ends_a_request() -> None:
    async def main() -> None:
        async with core(cost=SLOW) as system:
            limits = Limits(max_tokens=900, deadline_ns=2_000_000_000)
            _, end = await system.finish(submit("r1", limits=limits))
            assert isinstance(end, Failed) and end.failure.code is Code.DEADLINE_EXCEEDED
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize(("left_ns", "why"), [(-1, "has passed"), (5_000_000, "computing it takes")])
def test_a_deadline_that_cannot_be_met_ends_a_request_at_once(left_ns: int, why: str) -> None:
    async def main() -> None:
        async with core(cost=SLOW) as system:
            await asyncio.sleep(12.2)  # long heard of, and not when deadlines are looked at
            began_s = asyncio.get_running_loop().time()
            limits = Limits(max_tokens=9, deadline_ns=int(began_s * 1e9) + left_ns)
            _, end = await system.finish(submit("r1", num_tokens=500, limits=limits))
            assert isinstance(end, Failed) and end.failure.code is Code.DEADLINE_EXCEEDED
            assert why in end.failure.message and end.failure.retry_after_s == 0.0
            assert asyncio.get_running_loop().time() - began_s < 0.1
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize("victim", ["prefill/p0", "decode/d0"])
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.04, 0.06, 0.2])
def test_requests_of_a_killed_worker_go_on_elsewhere(victim: str, delay_s: float) -> None:
    async def main() -> None:
        async with core() as alone:
            expected = await alone.finish(submit("r0", num_tokens=500, max_tokens=50))
        async with core(2, 2, SLOW) as system:
            requests = [submit(f"r{i}", num_tokens=500, max_tokens=50) for i in range(8)]
            for request in requests:
                await system.send(request)
            await asyncio.sleep(delay_s)
            system.kill(victim)
            for request in requests:
                await asyncio.wait_for(system.listener.over(request.request_id).wait(), 120)
            for request in requests:
                end = system.listener.ends[request.request_id]
                assert (system.listener.tokens[request.request_id], end) == expected
            assert system.entrypoint.shard.detail()["lost"] <= 8
            _, end = await system.finish(submit("after"))
            assert end == LENGTH
            assert await quiet(system) == {}

    run_virtual(main())


def test_without_replicas_a_request_waits_for_one_to_come_back() -> None:
    async def main() -> None:
        async with core(0, 1) as system:
            await system.send(submit("r1"))
            await asyncio.sleep(5)
            assert "r1" not in system.listener.ends
            await system.with_prefill("p9")
            await system.listener.over("r1").wait()
            assert system.listener.ends["r1"] == LENGTH

    run_virtual(main())


def test_without_replicas_for_too_long_it_is_a_typed_error() -> None:
    async def main() -> None:
        async with core(0, 1) as system:
            _, end = await system.finish(submit("r1"))
            assert isinstance(end, Failed) and end.failure.code is Code.NO_REPLICA

    run_virtual(main())


def test_more_requests_than_decode_slots_wait_and_all_finish() -> None:
    async def main() -> None:
        async with core(1, 1, SLOW) as system:
            ends = await asyncio.gather(*(system.finish(submit(f"r{i}", max_tokens=20)) for i in range(30)))
            assert [end for _, end in ends] == [LENGTH] * 30
            assert await quiet(system) == {}

    run_virtual(main())


def test_stopping_ends_every_request() -> None:
    async def main() -> None:
        async with core(cost=SLOW) as system:
            await system.send(submit("r1", max_tokens=900))
            await asyncio.sleep(0.5)
            system.tasks["entrypoint/e0"].cancel()
            await system.listener.over("r1").wait()
            end = system.listener.ends["r1"]
            assert isinstance(end, Failed) and end.failure.code is Code.SHUTTING_DOWN

    run_virtual(main())
