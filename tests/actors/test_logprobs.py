"""Logprobs on their way: with their tokens, whatever is cut, lost or given again; and only where they are asked for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import kernels.engine
from actors.decode.slots import Generation
from actors.entrypoint.shard import Shard
from actors.rules.emission import MAX_BYTES, Emission, Held, resend_answer
from actors.rules.logprobs import KeptLogprobs, cut, message_of
from kernels.constraint import Logprobs
from kernels.timed import StepCost, TimedEngine
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.request import Failed, Finished, FinishReason, Limits, Resend, Sampling, TokenLogprobs, TokensEmitted
from tests.actors.builders import hand_over, submit
from tests.actors.core import VOCABULARY, Core, core, info, quiet
from tests.actors.test_lossy_bus import LossyBroker

STOP = Finished(reason=FinishReason.STOP)
COST = StepCost(step_ns=5_000_000)


def some(start: int, stop: int, num_top: int) -> TokenLogprobs:
    """Of the tokens from index `start` on: each one's differs."""
    return message_of(
        [
            Logprobs(-float(i), [(i * 32 + place, -i - place / 32) for place in range(num_top)])
            for i in range(start, stop)
        ]
    )


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_a_part_is_of_its_tokens(num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rules.logprobs.KEPT_TOKENS", 8)
    assert cut(some(0, 9, num_top), 3, 7) == some(3, 7, num_top)
    assert cut(some(0, 9, num_top), 9, 9) == TokenLogprobs(sampled=[])
    kept = KeptLogprobs()
    for start in (4, 6, 7, 11):
        kept.add(start, some(start, start + 4 if start == 7 else start + 1 + (start == 4), num_top))
    assert (kept.first, kept.get(4, 12)) == (4, some(4, 12, num_top))
    kept.add(12, some(12, 13, num_top))
    assert (kept.first, kept.get(9, 13)) == (9, some(9, 13, num_top)), "the older half is gone"


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000)), max_size=3), st.integers(0, 20))
def test_messages_split_them_with_their_tokens(adds: list[tuple[str, int]], num_top: int) -> None:
    emission, sent = Emission("s"), {"a": 0, "b": 0}
    for request_id, count in adds:
        start = sent[request_id]
        said = some(start, start + count, num_top) if request_id == "a" else None
        emission.add(request_id, 1, start, range(start, start + count), logprobs=said)
        sent[request_id] += count
    got = 0
    for message in emission.take():
        assert len(msgspec.msgpack.encode(message)) <= MAX_BYTES
        said_of = dict(message.logprobs)
        for i, count in enumerate(message.counts):
            if message.request_ids[i] == "b" or not count:
                assert i not in said_of
                continue
            assert said_of[i] == some(got, got + count, num_top)
            got += count
    assert got == sent["a"]


def test_the_largest_numbers_fit_the_size_contract() -> None:
    emission, worst = Emission("entrypoint/e0"), (1 << 32) - 1
    for i in range(300):
        said = message_of([Logprobs(-1 / 3, [(worst, -1 / 3)] * 20)] * 6)
        emission.add(f"{i:032x}", 1 << 62, 1 << 31, [worst] * 6, STOP, 1 << 20, said)
    messages = emission.take()
    assert len(messages) > 1 and all(len(msgspec.msgpack.encode(message)) <= MAX_BYTES for message in messages)


def test_they_are_given_again_as_far_as_they_fit_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rules.logprobs.KEPT_TOKENS", 800)
    kept = KeptLogprobs()
    kept.add(0, some(0, 600, 20))
    held = Held(4, range(600), STOP, kept)
    asked = Resend(request_ids=["a"], first_indexes=[10], epochs=[1])
    message = resend_answer("s", asked, lambda _: held)
    (count,) = message.counts
    assert 100 < count < 590 and message.ends == [] and message.logprobs == [(0, some(10, 10 + count, 20))]
    late = Resend(request_ids=["a"], first_indexes=[599], epochs=[1])
    message = resend_answer("s", late, lambda _: held)
    assert (message.counts, message.ends, message.logprobs) == ([1], [(0, STOP)], [(0, some(599, 600, 20))])
    kept.add(600, some(600, 900, 20))
    message = resend_answer("s", asked, lambda _: Held(4, range(900), STOP, kept))
    ((_, end),) = message.ends
    assert isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST and message.counts == [0]
    bare = structs.replace(asked, without_logprobs=True)  # as who follows a grammar asks, who needs all of the output
    message = resend_answer("s", bare, lambda _: Held(4, range(900), STOP, kept))
    assert (message.tokens, message.ends, message.logprobs) == ([*range(10, 900)], [(0, STOP)], [])


def test_tokens_that_come_twice_are_passed_on_with_theirs_once() -> None:
    shard = Shard("e0")
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, top_logprobs=2)
    request = shard.submit(submit("a", sampling=sampling), 0.0)
    assert request is not None
    request.dispatch("p0", 0.0)
    request.claim(request.epoch, "d0", 0.0)
    news = []
    for start, stop in ((0, 3), (1, 5)):
        emission = Emission("decode/d0")
        emission.add("a", request.epoch, start, range(start, stop), logprobs=some(start, stop, 2))
        (message,) = emission.take()
        news += shard.hear(message, 0.0).news
    assert [(item.tokens, item.logprobs) for item in news] == [([0, 1, 2], some(0, 3, 2)), ([3, 4], some(3, 5, 2))]
    asked = Resend(request_ids=["a"], first_indexes=[2], epochs=[0])
    assert shard.resend(asked).logprobs == [(0, some(2, 5, 2))]


def test_an_engine_is_told_and_tells_of_what_is_emitted() -> None:
    """Of a request that came here behind 4 tokens of output."""
    sampling = Sampling(temperature=0.5, top_p=0.9, seed=3, top_logprobs=1, logit_bias=((7, -2.0),), top_k=5, min_p=0.5)
    offer = structs.replace(hand_over(num_tokens=30), num_output=4, sampling=sampling)
    generation = Generation(structs.replace(offer, limits=Limits(max_tokens=20, min_tokens=6)))
    assert generation.sampling == kernels.engine.Sampling(0.5, 0.9, 3, 26 + 6, 1, ((7, -2.0),), 5, 0.5)
    assert generation.advance([8, 9, 1, 5], eos_token=1, max_tokens=1000) == [8, 9]
    found = [Logprobs(-float(i), [(i, -i / 2)]) for i in range(4)]
    generation.add_logprobs(found, 2)
    assert generation.logprobs is not None and generation.logprobs.get(5, 6) == message_of(found[1:2])
    assert generation.untold() == (4, [8, 9], message_of(found[:2])) and generation.untold() == (6, [], None)


def told(system: Core) -> dict[str, TokenLogprobs]:
    """All of each request, in one piece."""
    whole: dict[str, TokenLogprobs] = {}
    for request_id, parts in system.listener.logprobs.items():
        whole[request_id] = TokenLogprobs(
            sampled=[value for part in parts for value in part.sampled],
            top_tokens=[token for part in parts for token in part.top_tokens],
            top=[value for part in parts for value in part.top],
        )
    return whole


async def generate(
    broker: RecordingBroker | None = None, num_replicas: int = 1
) -> tuple[dict[str, list[int]], dict[str, TokenLogprobs]]:
    async with core(num_replicas, num_replicas, COST, broker) as system:
        requests = [
            submit(f"r{i}", 50 + i, 30, sampling=Sampling(temperature=1.0, top_p=1.0, seed=i, top_logprobs=i % 4 - 1))
            for i in range(12)
        ]
        await asyncio.gather(*(system.finish(request) for request in requests))
        assert await quiet(system, 120.0) == {}
        return dict(system.listener.tokens), told(system)


def test_they_come_with_every_token_however_messages_are_lost() -> None:
    tokens, truth = run_virtual(generate())
    assert sorted(truth) == sorted(f"r{i}" for i in range(12) if i % 4), "of those who asked"
    for request_id, said in truth.items():
        num_top = int(request_id[1:]) % 4 - 1
        assert len(said.sampled) == len(tokens[request_id]) == 30
        assert len(said.top) == len(said.top_tokens) == 30 * num_top
    assert run_virtual(generate(num_replicas=2)) == (tokens, truth)
    for road in (".e0.tokens", ".resend"):
        broker = LossyBroker(lambda subject, road=road: subject.endswith(road), 3)  # type: ignore[misc]
        assert run_virtual(generate(broker, 2)) == (tokens, truth)


def test_a_shard_gives_a_recipe_what_it_missed() -> None:
    async def main() -> None:
        async with core() as system:
            sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, top_logprobs=2)
            await system.finish(submit("r1", max_tokens=20, sampling=sampling))
            again: TokensEmitted = system.entrypoint.shard.resend(
                Resend(request_ids=["r1"], first_indexes=[7], epochs=[0])
            )
            ((_, said),) = again.logprobs
            assert said == cut(told(system)["r1"], 7, 20)

    run_virtual(main())


@pytest.mark.parametrize("min_tokens", [0, 7, 30])
def test_an_answer_does_not_end_by_itself_before_its_least(min_tokens: int) -> None:
    async def main() -> list[tuple[list[int], object]]:
        async with core(num_decode=0) as system:
            engine = TimedEngine(info(num_slots=16), VOCABULARY, COST, mean_output=3, most_accepted=4)
            await system.add_decode("d0", engine)
            limits = Limits(max_tokens=30, min_tokens=min_tokens)
            finishing = (system.finish(submit(f"r{i}", 9 + i, limits=limits)) for i in range(16))
            return list(await asyncio.gather(*finishing))

    ended = run_virtual(main())
    shortest = min(len(tokens) for tokens, _ in ended)
    if min_tokens == 30:
        assert {str(end) for _, end in ended} == {str(Finished(reason=FinishReason.LENGTH))}
    else:
        assert min_tokens <= shortest < min_tokens + 3, "as many as had to be, and not many more"
