"""The KV cache as a whole: what is computed, what is read instead, and that the tokens stay the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from actors.metadata.actor import Metadata
from actors.prefill.actor import Prefill
from actors.writer.actor import Writer
from bus.snapshots import SNAPSHOT_S
from run.virtual import run_virtual
from schemas.request import Sampling
from tests.actors.cached import Cached, ask, cached, prompt
from tests.actors.core import quiet

SEEDED = Sampling(temperature=1.0, top_p=0.9, seed=11)


def in_system(work: Callable[[Cached], Awaitable[None]]) -> None:
    """Run a test in a system of its own; afterwards nothing may be held."""

    async def run() -> None:
        async with cached() as system:
            await work(system)
            assert await quiet(system) == {}

    run_virtual(run())


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [255, 256, 257, 383, 384, 640, 1000, 1151, 1152])
def test_the_same_prompt_again(num_tokens: int, sampling: Sampling | None) -> None:
    async def work(system: Cached) -> None:
        fields = {} if sampling is None else {"sampling": sampling}
        cold = await system.run(ask("r1", prompt(num_tokens), **fields))
        assert system.total("computed_tokens") == num_tokens
        await system.settle()
        again = await system.run(ask("r2", prompt(num_tokens), **fields))
        usable = num_tokens // 128 - 1
        assert again == cold
        assert system.listener.cached.get("r2", 0) == system.total("restored_tokens") == usable * 128
        assert system.total("computed_tokens") == 2 * num_tokens - usable * 128
        assert system.total("replayed_tokens") == 0  # its windows came along
        assert system.total("read_bytes") == usable * (64 + 64)

    in_system(work)


def test_a_second_turn_computes_its_new_tokens() -> None:
    async def work(system: Cached) -> None:
        first = prompt(700)
        answer = await system.run(ask("r1", first, max_tokens=300))
        await system.settle()
        known = first + b"".join(token.to_bytes(4, "little") for token in answer)
        second = prompt(len(known) // 4 + 50, 5, after=known)
        before = system.total("computed_tokens")
        warm = await system.run(ask("r2", second))
        # All that decode made blocks of, too: its last token was never fed.
        blocks = (len(known) // 4 - 1) // 128
        blocks = min(blocks, len(second) // 512 - 1)
        assert system.listener.cached["r2"] == blocks * 128 > 700
        assert system.total("computed_tokens") - before == len(second) // 4 - blocks * 128
        assert system.total("replayed_tokens") == 0
        async with cached() as fresh:
            assert await fresh.run(ask("r2", second)) == warm

    in_system(work)


def test_any_replica_serves_any_prefix() -> None:
    async def work(system: Cached) -> None:
        cold = await system.run(ask("r1", prompt(1000)))
        await system.settle()
        maker, other = sorted(system.of(Prefill), key=lambda actor: -actor.load().detail["computed_tokens"])
        assert other.load().detail["computed_tokens"] == 0
        await maker.drain()
        assert await system.run(ask("r2", prompt(1000))) == cold
        assert other.load().detail["restored_tokens"] == 768
        assert other.load().detail["snapshot_bytes"] > 0

    in_system(work)


def test_without_snapshots_a_block_is_replayed_and_said_to_be() -> None:
    async def work(system: Cached) -> None:
        await system.run(ask("r1", prompt(1000)))
        await system.settle()
        for keeper in system.keepers():
            keeper.snapshots.clear()
        await system.run(ask("r2", prompt(1000)))
        assert system.listener.cached["r2"] == 768 - 128
        assert system.total("replayed_tokens") == 128
        request = system.entrypoint.shard.get("r2")
        assert request is not None and request.is_approximate
        first = system.entrypoint.shard.get("r1")
        assert first is not None and not first.is_approximate

    in_system(work)


def test_approximate_is_inherited_and_exact_replaces_it() -> None:
    async def work(system: Cached) -> None:
        await system.run(ask("r1", prompt(700)))
        await system.settle()
        for keeper in system.keepers():
            keeper.snapshots.clear()
        longer = prompt(1400, 3, after=prompt(700))
        await system.run(ask("r2", longer))  # replays, and stores what follows
        await system.settle()
        await system.run(ask("r3", longer))
        request = system.entrypoint.shard.get("r3")
        assert request is not None and request.is_approximate and system.listener.cached["r3"] == 1152
        await system.run(ask("r4", longer, exact=True))
        request = system.entrypoint.shard.get("r4")
        assert request is not None and not request.is_approximate and system.listener.cached.get("r4", 0) == 0
        await system.settle()
        await system.run(ask("r5", longer))
        request = system.entrypoint.shard.get("r5")
        assert request is not None and not request.is_approximate and system.listener.cached["r5"] == 1152

    in_system(work)


def test_caches_do_not_meet_unless_they_are_one() -> None:
    async def work(system: Cached) -> None:
        await system.run(ask("r1", prompt(700), cache="acme"))
        await system.settle()
        await system.run(ask("r2", prompt(700), cache="other"))
        assert system.listener.cached.get("r2", 0) == 0
        await system.run(ask("r3", prompt(700), cache="acme"))
        assert system.listener.cached["r3"] == 512

    in_system(work)


@pytest.mark.parametrize("role", ["metadata", "writer", "kvstore", "prefill", "decode"])
def test_after_a_restart_of_each_role_prefixes_are_found(role: str) -> None:
    async def work(system: Cached) -> None:
        cold = await system.run(ask("r1", prompt(1000)))
        await system.settle()
        for name in [name for name in system.actors if name.startswith(f"{role}/")]:
            await system.restart(name)
        await system.settle()
        assert await system.run(ask("r2", prompt(1000))) == cold
        # What prefill kept of windows went with it.
        assert system.listener.cached["r2"] == (640 if role == "prefill" else 768)
        await system.run(ask("r3", prompt(1000, 9)))
        await system.settle()
        await system.run(ask("r4", prompt(1000, 9)))
        assert system.listener.cached["r4"] == 768

    in_system(work)


def test_all_blocks_are_there_once() -> None:
    async def work(system: Cached) -> None:
        for number in range(3):
            await system.run(ask(f"r{number}", prompt(1000)))
            await system.settle()
        stored = sum(writer.load().detail["blocks"] for writer in system.of(Writer))
        assert stored == 1000 // 128
        assert sum(shard.load().detail["blocks"] for shard in system.of(Metadata)) == stored

    in_system(work)


SHARED = prompt(900, 77)
"""A system prompt: seven blocks and a bit."""


@pytest.mark.parametrize("num_tokens", [905, 1023, 1024, 1030, 1151, 1152, 1500])
def test_another_question_behind_the_same_beginning_is_exact(num_tokens: int) -> None:
    async def work(system: Cached) -> None:
        await system.run(ask("r1", prompt(2000, 1, after=SHARED), branches=[900]))
        await system.settle()
        other = prompt(num_tokens, 2, after=SHARED)
        before = system.total("computed_tokens")
        warm = await system.run(ask("r2", other, branches=[900]))
        usable = min(900 // 128, num_tokens // 128 - 1)
        assert system.listener.cached["r2"] == usable * 128 >= 6 * 128
        assert system.total("computed_tokens") - before == num_tokens - usable * 128
        assert system.total("replayed_tokens") == 0
        request = system.entrypoint.shard.get("r2")
        assert request is not None and not request.is_approximate
        async with cached() as fresh:
            assert await fresh.run(ask("r2", other)) == warm

    in_system(work)


def test_a_beginning_that_is_in_use_stays_exact() -> None:
    """For longer than windows are kept that nobody uses."""

    async def work(system: Cached) -> None:
        await system.run(ask("r0", prompt(2000, 1, after=SHARED), branches=[900]))
        for number in range(1, 6):
            await system.settle(SNAPSHOT_S * 0.7)
            await system.run(ask(f"r{number}", prompt(2000, number + 1, after=SHARED), branches=[900]))
            assert system.listener.cached[f"r{number}"] == 7 * 128
        assert system.total("replayed_tokens") == 0

    in_system(work)


def test_examples_that_many_prompts_share_are_exact_too() -> None:
    async def work(system: Cached) -> None:
        examples = prompt(1500, 3, after=SHARED)
        for number, shared in enumerate([SHARED, examples]):  # the system prompt alone, then with examples
            branches = [900, 1500][: number + 1]
            await system.run(ask(f"r{number}", prompt(2000, 4, after=shared), branches=branches))
            await system.settle()
        await system.run(ask("r2", prompt(2000, 5, after=examples), branches=[900, 1500]))
        assert system.listener.cached["r1"] == 7 * 128 and system.listener.cached["r2"] == 11 * 128
        assert system.total("replayed_tokens") == 0

    in_system(work)
