"""The simulation of policies: one history per seed, time that adds up, and what it is there to show."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate

import numpy as np
import pytest

from kernels.engine import Admission, EngineInfo, Sampling
from run.settings import SettingsError
from run.simulate.agents import chat
from run.simulate.arrival import Arrival, num_blocks, tokens_of
from run.simulate.engine import SimEngine
from run.simulate.options import POLICIES, Options, Result
from run.simulate.runner import paced, simulate
from run.simulate.truth import Piece, Truth
from run.virtual import run_virtual

EOS = 1 << 17
GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)


def workload(num: int, seed: int = 0) -> list[Arrival]:
    """Conversations of a heavy-tailed length, each of which comes twice, the second time longer."""
    draw, arrivals = np.random.default_rng(seed), list[Arrival]()
    times = accumulate(draw.exponential(1.0, num))
    for number, at_s in enumerate(times):
        conversation = number if number % 2 == 0 or number < 20 else number - 19
        num_tokens = int(min(60_000, 200 + draw.pareto(1.2) * 1500)) + (number % 2) * 300
        blocks = tuple(conversation << 20 | block for block in range(num_blocks(num_tokens)))
        arrivals.append(Arrival(at_s, num_tokens, int(draw.integers(1, 300)), blocks))
    return arrivals


def p99(result: Result) -> float:
    """Of the time to first token."""
    return float(np.percentile([one.ttft_s for one in result.outcomes], 99))


def test_every_policy_answers_everything_and_the_same_each_time() -> None:
    options = Options(POLICIES, num_prefill=4, num_decode=2, seed=3)
    arrivals = workload(24)
    first, again = simulate(arrivals, options), simulate(arrivals, options)
    for policy in POLICIES:
        assert first[policy].outcomes == again[policy].outcomes
        assert first[policy].prefill_busy_s == again[policy].prefill_busy_s
        assert [one.failed for one in first[policy].outcomes] == [None] * 24
        assert all(one.ttft_s > 0 for one in first[policy].outcomes)
    other = simulate(arrivals, Options(("quota",), num_prefill=4, num_decode=2, seed=4))
    assert other["quota"].outcomes != first["quota"].outcomes


def test_what_comes_all_at_once_cannot_be_stretched() -> None:
    arrivals = [Arrival(0.0, 100, 1, (number,)) for number in range(3)]
    assert paced(arrivals, Options(("quota",)), Truth()) == arrivals


def test_the_load_is_what_was_asked_for() -> None:
    options = Options(("quota",), num_prefill=4, num_decode=2, load=0.5)
    arrivals = paced(workload(80), options, Truth())
    result = simulate(workload(80), options)["quota"]
    assert sum(result.prefill_busy_s) / 4 / arrivals[-1].at_s == pytest.approx(0.5, rel=0.15)
    num_cached = sum(one.num_cached for one in result.outcomes)
    assert 0 < num_cached < sum(one.num_prompt for one in result.outcomes)


def test_what_is_published_is_what_a_prompt_takes_alone() -> None:
    measured_ms = {4096: 245, 16384: 894, 65536: 3618, 131072: 7740}
    for num_tokens, took_ms in measured_ms.items():
        assert Truth().prefill_ns([Piece(num_tokens, 0, True)]) / 1e6 == pytest.approx(took_ms, rel=0.02)


def engine() -> SimEngine:
    info = EngineInfo(
        model="m",
        layout="l",
        vocab_size=10,
        eos_token=EOS,
        max_tokens=1000,
        num_slots=4,
        max_step_tokens=100,
        capacity_tokens=4000,
        space="s",
        block_bytes=0,
    )
    answers = {"a": (5, tokens_of((1,))[:40]), "b": (5, tokens_of((2,))[:11])}
    return SimEngine(info, Truth(noise=0.0, hitch_chance=0.0), answers, speed=1.0, chance=random.Random(0))


@pytest.mark.parametrize("nudges", [(), (0.05, 0.11, 0.3), tuple(step / 100 for step in range(1, 60))])
def test_steps_taken_at_once_end_when_they_would_have_ended_one_by_one(nudges: tuple[float, ...]) -> None:
    async def main() -> dict[str, tuple[int, float]]:
        subject, found, left = engine(), dict[str, tuple[int, float]](), ["a", "b"]
        loop = asyncio.get_running_loop()
        for at_s in nudges:
            loop.call_later(at_s, subject.nudge)
        for key in left:
            assert subject.admit(key, 100, GREEDY) is Admission.OK
        counts = dict.fromkeys(left, 0)
        while left:
            for key, tokens in zip(left.copy(), await subject.decode(left), strict=True):
                counts[key] += len(tokens) - (EOS in tokens)
                if EOS in tokens:
                    found[key] = counts[key], round(loop.time(), 6)
                    left.remove(key)
                    subject.free(key)
        return found

    # 11 tokens: the first alone, then 3 a step, of 20.2 ms; with b gone, of 20.1 ms.
    steps_b, steps_a = 1 + 4, 1 + 14
    expected = {"b": (11, round(steps_b * 0.0202, 6)), "a": (40, round(steps_b * 0.0202 + (steps_a - 5) * 0.0201, 6))}
    assert run_virtual(main()) == expected


def test_an_answer_goes_on_where_an_earlier_owner_stopped() -> None:
    async def main() -> list[list[int]]:
        subject, found = engine(), list[list[int]]()
        for num_tokens in (5, 5 + 20):
            assert subject.admit("a", num_tokens + 8, GREEDY) is Admission.OK and subject.grow("a", 100)
            await subject.restore("a", num_tokens.to_bytes(8, "little"))
            output: list[int] = []
            while EOS not in output:
                output += (await subject.decode(["a"]))[0]
            found.append(output)
            subject.free("a")
        return found

    answer = [*tokens_of((1,))[:40].tolist(), EOS]
    assert run_virtual(main()) == [answer, answer[20:]]


def test_who_looks_at_the_load_is_told_from_who_does_not() -> None:
    options = Options(("quota", "round-robin"), num_prefill=4, num_decode=2)
    result = simulate(workload(120, seed=1), options)
    assert p99(result["quota"]) < 0.7 * p99(result["round-robin"])
    busy = {policy: max(found.prefill_busy_s) / np.mean(found.prefill_busy_s) for policy, found in result.items()}
    assert busy["quota"] < busy["round-robin"]


def test_a_million_tokens_amid_chat() -> None:
    """Case 28: the same chats with and without it; its tenant has no part in it."""
    options = Options(("quota",), num_prefill=4, num_decode=4, load=None)
    chats = chat(150, 0.3 * options.num_prefill * 1e9)
    blocks = tuple(range(1 << 40, (1 << 40) + num_blocks(1_000_000)))
    million = Arrival(chats[20].at_s, 1_000_000, 10, blocks, chats[20].tenant)
    without = simulate(chats, options)["quota"]
    amid = simulate([*chats[:20], million, *chats[20:]], options)["quota"]
    assert amid.outcomes[20].failed is None and amid.outcomes[20].ttft_s > 100
    del amid.outcomes[20]
    assert p99(amid) < 1.5 * p99(without)


def test_an_actor_that_crashes_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Truth, pieces: object) -> float:
        raise RuntimeError("planted")

    monkeypatch.setattr(Truth, "prefill_ns", broken)
    with pytest.raises(RuntimeError, match="planted"):
        simulate(workload(3), Options(("quota",), num_prefill=1, num_decode=1, load=None))


def test_what_would_take_for_ever_is_refused() -> None:
    late = [Arrival(0.0, 10, 1, (1,)), Arrival(1e12, 10, 1, (2,))]
    with pytest.raises(SettingsError, match="more than 3 days"):
        simulate(late, Options(("quota",), load=None))
