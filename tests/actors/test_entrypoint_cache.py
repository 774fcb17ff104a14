"""The entrypoint and the cache: look-ups over scripted metadata shards, and what becomes of them at prefill."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from msgspec import structs

from actors.entrypoint.finder import FRESH_S
from actors.rules.chain import BLOCK_TOKENS, root
from bus.actor import HEARTBEAT_S
from bus.lookup import DESCRIBE_S, LOOKUP_S
from bus.subjects import CANCEL, EXITED, RESEND
from schemas.bulk import Payload
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, Cancelled, Failed, Finished, FinishReason, Limits, Resend
from tests.actors.builders import prompt_bytes, submit
from tests.actors.scripted import Scene, played, until
from tests.actors.test_lossy_bus import LossyBroker

STOP = Finished(reason=FinishReason.STOP)
LONG = 10 * BLOCK_TOKENS + 5


def locations(blocks: range) -> bytes:
    return np.array([(number + 1) << 25 for number in blocks], dtype="<u8").tobytes()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("missing", [0, 1, 2, 6, 9])
def test_the_prefix_ends_at_the_first_miss_over_all_shards(num_shards: int, missing: int) -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG)
        world.store(request, range(missing))
        world.store(request, range(missing + 1, 10))
        prefix = await world.prefix(request)
        assert (prefix.space, prefix.keys) == ("space", b"".join(world.keys(request)))
        assert prefix.root == root("space")
        assert prefix.locations == locations(range(missing))
        assert prefix.num_blocks == (missing if missing > 1 else 0), "of one block without windows nothing is left"
        assert {shard.num_asked for shard in world.shards} <= {0, 1}

    played(play, num_shards)


@pytest.mark.parametrize(
    ("ends", "start"), [((9,), 9 * 128), ((9, 8), 9 * 128), ((8, 7), 8 * 128), ((7,), 8 * 128), ((), 8 * 128)]
)
def test_windows_at_the_end_or_one_block_before_it_or_a_replay(ends: tuple[int, ...], start: int) -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG)
        world.store(request, range(10), ends)
        dispatch = await world.placed(request)
        assert dispatch.prefix is not None and dispatch.prefix.num_blocks == 9
        assert [end for end, _ in dispatch.prefix.snapshots] == [end for end in (9, 8) if end in ends]
        known = world.entrypoint.shard.get("r1")
        assert known is not None and known.hit.start == start
        assert known.is_approximate is not bool(set(ends) & {8, 9})
        route = known.route()
        num_blocks = 8 if 8 in ends and 9 not in ends else 9
        assert (route.num_blocks, route.num_replayed) == (num_blocks, num_blocks * 128 - start)
        assert (route.num_new, route.num_cached) == (LONG - num_blocks * 128, num_blocks * 128)

    played(play)


def test_the_short_have_names_and_ask_nobody() -> None:
    async def play(world: Scene) -> None:
        for num_tokens, num_keys in ((5, 0), (128, 1), (255, 1)):
            prefix = await world.prefix(submit(f"r{num_tokens}", num_tokens=num_tokens))
            assert (len(prefix.keys), prefix.num_blocks, prefix.root) == (16 * num_keys, 0, root("space"))
        assert all(shard.num_asked == 0 for shard in world.shards)
        await world.placed(submit("long", num_tokens=256))
        assert any(shard.num_asked for shard in world.shards)

    played(play)


def test_an_exact_request_asks_nobody_and_its_blocks_are_named() -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG, exact=True)
        world.store(request, range(10), (9,))
        dispatch = await world.placed(request)
        prefix = dispatch.prefix
        assert dispatch.exact and prefix is not None and len(prefix.keys) == 160
        assert (prefix.locations, prefix.num_blocks, prefix.snapshots) == (b"", 0, [])
        assert all(shard.num_asked == 0 for shard in world.shards) and world.recipe.touched == []

    played(play)


def test_caches_of_different_salt_do_not_meet() -> None:
    async def play(world: Scene) -> None:
        world.store(submit(num_tokens=LONG, cache="acme"), range(10))
        assert (await world.prefix(submit("other", num_tokens=LONG, cache="beta"))).locations == b""
        assert (await world.prefix(submit("same", num_tokens=LONG, cache="acme"))).num_blocks == 9

    played(play)


def test_without_shards_or_without_a_space_it_is_computed() -> None:
    async def no_shards(world: Scene) -> None:
        assert (await world.prefix(submit(num_tokens=LONG))).num_blocks == 0

    async def no_space(world: Scene) -> None:
        assert (await world.placed(submit(num_tokens=LONG))).prefix is None

    played(no_shards, 0)
    played(no_space, 2, None)


def test_a_silent_shard_lacks_its_keys_and_is_not_asked_until_it_reports_again() -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG)
        world.store(request, range(10))
        keys = world.keys(request)
        first = next(number for number, key in enumerate(keys) if world.owner(key) is not world.owner(keys[0]))
        stuck = world.owner(keys[first])
        stuck.is_stuck = True
        stuck_heartbeat, stuck.load = stuck.load, lambda: structs.replace(stuck_heartbeat(), role=Role.GATEWAY)  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prefix = await world.prefix(request)
        assert prefix.locations == locations(range(first)) and LOOKUP_S <= loop.time() - began_s < LOOKUP_S + 0.1
        began_s = loop.time()
        await world.prefix(submit("r2", num_tokens=LONG))
        assert loop.time() - began_s < 0.1 and stuck.num_asked == 1
        stuck.load, stuck.is_stuck = stuck_heartbeat, False  # type: ignore[method-assign]
        await asyncio.sleep(HEARTBEAT_S)
        assert (await world.prefix(submit("r3", num_tokens=LONG))).num_blocks == 9
        assert stuck.num_asked == 2

    played(play)


def test_a_killed_shard_costs_its_keys_and_no_time_and_another_in_its_place_is_empty() -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG)
        world.store(request, range(10))
        world.kill("metadata/m0")
        lost = world.actors["metadata/m0"]
        left = [world.owner(key) is not lost for key in world.keys(request)]
        began_s = asyncio.get_running_loop().time()
        assert (await world.prefix(request)).locations == locations(range(left.index(False)))
        assert asyncio.get_running_loop().time() - began_s < 0.1
        await world.add_shard("m0")
        await asyncio.sleep(0.01)
        assert (await world.prefix(submit("r2", num_tokens=LONG))).locations == locations(range(left.index(False)))
        world.store(request, range(10))
        assert (await world.prefix(submit("r3", num_tokens=LONG))).locations == locations(range(10))

    played(play)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_that_ends_during_its_look_up_stops_there(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def play(world: Scene) -> None:
        for shard in world.shards:
            shard.is_stuck = True
        num_tasks = len(world.entrypoint._tasks)
        deadline_ns = int(asyncio.get_running_loop().time() * 1e9) + 1 if how == "deadline" else 0
        await world.send(submit(num_tokens=LONG, limits=Limits(max_tokens=8, deadline_ns=deadline_ns)))
        await until(lambda: all(shard.num_asked for shard in world.shards))
        request = world.entrypoint.shard.get("r1")
        assert request is not None and world.entrypoint.shard.num_live == 1
        if how == "cancel":
            asked = await world.recipe.bus.ask(CANCEL.at("e0"), Cancel(request_id="r1"), timeout_s=0.1)
            assert asked.was_running and request.end == Cancelled()
        else:
            await until(lambda: request.end is not None)
            assert isinstance(request.end, Failed)
        ended_s = asyncio.get_running_loop().time()
        await until(lambda: len(world.entrypoint._tasks) == num_tasks)
        await until(lambda: not [task for task in asyncio.all_tasks() if "Lookups" in str(task.get_coro())])
        assert asyncio.get_running_loop().time() - ended_s < 0.1
        # What it was asked for is not waited for, and who was not given time is not held to be silent.
        for shard in world.shards:
            shard.is_stuck = False
        world.store(submit(num_tokens=LONG), range(10))
        began_s = asyncio.get_running_loop().time()
        assert (await world.prefix(submit("r1", num_tokens=LONG))).num_blocks == 9
        assert asyncio.get_running_loop().time() - began_s < 0.1
        await asyncio.sleep(2 * LOOKUP_S)
        assert len(world.replica.dispatches) == 1

    played(play)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_request_that_ends_while_its_prompt_is_put_on_offer_is_not_dispatched() -> None:
    async def play(world: Scene) -> None:
        bulk = world.bulks["entrypoint/e0"]
        wrap = bulk.wrap

        async def ended_meanwhile(data: bytes) -> Payload:
            payload = await wrap(data)
            (request,) = world.entrypoint.shard.live()
            world.entrypoint._end(request, Cancelled())
            return payload

        bulk.wrap = ended_meanwhile  # type: ignore[assignment, method-assign]
        await world.send(submit(num_tokens=1 << 15))
        await until(lambda: not world.entrypoint.shard.num_live)
        await asyncio.sleep(1.0)
        assert not world.replica.dispatches and bulk.num_offers == 0

    played(play)


@pytest.mark.parametrize("role", [Role.METADATA, Role.PREFILL])
def test_who_ended_with_its_process_takes_no_part_any_more(role: Role) -> None:
    async def play(world: Scene) -> None:
        ids = [shard.id for shard in world.shards] if role is Role.METADATA else ["p0"]
        peers, loop = world.entrypoint._finder.peers, asyncio.get_running_loop()
        assert peers.shards(loop.time()) and peers._prefill.alive(loop.time())
        exited = ProcessExited(name="x", pid=1, members=[f"{role}/{id}" for id in ids])
        await world.recipe.bus.tell(EXITED.all(), exited)
        await asyncio.sleep(0.01)
        left = peers.shards(loop.time()) if role is Role.METADATA else peers._prefill.alive(loop.time())
        assert not left

    played(play)


def test_the_end_of_an_earlier_request_of_its_id_is_none_of_its_own() -> None:
    async def play(world: Scene) -> None:
        for shard in world.shards:
            shard.is_stuck = True
        await world.send(submit(num_tokens=LONG))
        first = world.entrypoint.shard.get("r1")
        assert first is not None
        await world.recipe.bus.ask(CANCEL.at("e0"), Cancel(request_id="r1"), timeout_s=0.1)
        for shard in world.shards:
            shard.is_stuck = False
        world.store(submit(num_tokens=LONG), range(10))
        await world.send(submit(num_tokens=LONG))
        assert world.entrypoint.shard.get("r1") is not first
        world.entrypoint._end(first, Cancelled())  # what was left of it to do has failed
        assert (await world.prefix(submit(num_tokens=LONG))).num_blocks == 9

    played(play)


def test_what_prefill_restored_in_fact_is_what_counts() -> None:
    async def play(world: Scene) -> None:
        world.store(submit(num_tokens=LONG), range(10), (9,))
        dispatch = await world.placed(submit(num_tokens=LONG))
        request = world.entrypoint.shard.get("r1")
        assert request is not None and request.hit.start == 9 * 128
        await world.shorten(dispatch, 3, 256, epoch=dispatch.epoch - 1)
        await world.shorten(dispatch, 3, 256, epoch=dispatch.epoch + 1)
        assert request.attributes() == {"shoal.cache.hit_tokens": 9 * 128, "shoal.cache.approximate": False}
        await world.shorten(dispatch, 3, 256)
        assert request.attributes() == {"shoal.cache.hit_tokens": 256, "shoal.cache.approximate": True}
        epoch = await world.claim(dispatch)
        await world.shorten(dispatch, 2, 128)
        assert request.hit.start == 128, "said late of the dispatch that led here, it is as true"
        await world.shorten(dispatch, 1, 0, epoch=epoch)
        assert request.hit.start == 128
        emitted = await world.emit("r1", epoch, [5, 6])
        assert emitted.cached == [(0, 128)]
        gone = structs.replace(dispatch, request_id="nobody")
        await world.shorten(gone, 1, 0)

    played(play)


@pytest.mark.parametrize("tokens", [[5, 6], []])
def test_the_recipe_hears_of_the_hit_with_the_first_tokens_or_the_end_and_when_it_asks_again(tokens: list[int]) -> None:
    async def play(world: Scene) -> None:
        world.store(submit(num_tokens=LONG), range(10), (9,))
        epoch = await world.claim(await world.placed(submit(num_tokens=LONG)))
        emitted = await world.emit("r1", epoch, tokens, STOP)
        assert (emitted.cached, emitted.tokens, emitted.ends) == ([(0, 9 * 128)], tokens, [(0, STOP)])
        for first, cached in ((0, [(0, 9 * 128)]), (1, []))[: 1 + len(tokens)]:
            resend = Resend(request_ids=["r1"], first_indexes=[first], epochs=[epoch])
            again = await world.recipe.bus.ask(RESEND.at("e0"), resend, timeout_s=5)
            assert again.cached == cached

    played(play)


def test_blocks_in_use_are_told_of_together() -> None:
    async def play(world: Scene) -> None:
        requests = [submit(f"r{n}", num_tokens=LONG, cache=f"c{n % 3}") for n in range(6)]
        for request in requests[:3]:
            world.store(request, range(4))
        await asyncio.gather(*map(world.prefix, requests))
        await until(lambda: bool(world.recipe.touched))
        expected = {world.keys(request)[3] for request in requests}
        told = b"".join(world.recipe.touched)
        assert {told[i : i + 16] for i in range(0, len(told), 16)} == expected
        assert len(world.recipe.touched) < len(requests)
        await world.placed(submit("miss", num_tokens=LONG, cache="none"))
        await asyncio.sleep(0.1)
        assert b"".join(world.recipe.touched) == told

    played(play)


def test_a_look_up_grown_old_is_made_again_before_it_is_used() -> None:
    async def play(world: Scene) -> None:
        request = submit(num_tokens=LONG)
        world.replica.is_full = True
        await world.send(request)
        await asyncio.sleep(1.0)
        num_asked = sum(shard.num_asked for shard in world.shards)
        world.store(request, range(10))
        await asyncio.sleep(FRESH_S + 1)
        assert num_asked < sum(shard.num_asked for shard in world.shards) <= 2 * num_asked + 2
        world.replica.is_full = False
        await until(lambda: bool(world.replica.dispatches))
        prefix = world.replica.dispatches[0].prefix
        assert prefix is not None and prefix.num_blocks == 9

    played(play)


def test_a_look_up_made_again_is_under_the_names_of_now() -> None:
    async def play(world: Scene) -> None:
        world.replica.is_full = True
        await world.send(submit(num_tokens=LONG))
        await asyncio.sleep(1.0)
        world.entrypoint._finder.peers.described("p0", "new weights")
        await asyncio.sleep(FRESH_S + 1)
        world.replica.is_full = False
        await until(lambda: bool(world.replica.dispatches))
        prefix = world.replica.dispatches[0].prefix
        assert prefix is not None and (prefix.space, prefix.root) == ("new weights", root("new weights"))

    played(play)


def test_a_prompt_of_a_million_tokens_is_found() -> None:
    async def play(world: Scene) -> None:
        num_tokens = 1 << 20
        prompt = await world.bulks["entrypoint/e0"].wrap(prompt_bytes(num_tokens))
        assert prompt.handle is not None
        inline = submit(num_tokens=num_tokens)
        world.store(inline, range(8192), (8191, 8190))
        prefix = await world.prefix(structs.replace(inline, prompt=prompt))
        assert prefix.num_blocks == 8191 and len(prefix.locations) == 8 * 8192
        assert [end for end, _ in prefix.snapshots] == [8191, 8190]

    played(play)


@pytest.mark.parametrize(("verb", "one_in"), [("find", 3), ("find", 5), ("load", 2), ("load", 3), ("touched", 2)])
def test_lost_and_doubled_messages_shorten_prefixes_and_do_nothing_else(verb: str, one_in: int) -> None:
    broker = LossyBroker(lambda subject: subject.endswith(verb), one_in)

    async def play(world: Scene) -> None:
        found = []
        for number in range(12):
            request = submit(f"r{number}", num_tokens=LONG)
            world.store(request, range(10))
            prefix = (await world.placed(request)).prefix
            if prefix is not None:
                assert prefix.keys == b"".join(world.keys(request))
                assert prefix.locations == locations(range(len(prefix.locations) // 8))
                found.append(prefix.num_blocks)
            await asyncio.sleep(HEARTBEAT_S)
        assert 9 in found and broker.num_lost > 0
        if verb == "touched":
            assert found == [9] * 12

    played(play, broker=broker)


def test_a_lost_description_is_asked_for_again() -> None:
    lost: list[str] = []

    def is_first(subject: str) -> bool:
        is_it = subject.endswith("describe") and not lost
        lost.extend([subject] * is_it)
        return is_it

    async def play(world: Scene) -> None:
        assert lost and (await world.placed(submit("r1", num_tokens=LONG))).prefix is None
        await asyncio.sleep(DESCRIBE_S + HEARTBEAT_S)
        assert (await world.placed(submit("r2", num_tokens=LONG))).prefix is not None

    played(play, broker=LossyBroker(is_first, 1))
