"""What only the timed engine has: the time it spends and the tokens it makes up."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.engine import Admission, Chunk
from kernels.timed import StepCost, TimedEngine
from tests.conftest import Run
from tests.kernels.test_engine import GREEDY, TIMED, WARM, generate, tokens


def test_a_step_costs_what_it_was_told(run_async: Run) -> None:
    async def main() -> None:
        engine = TimedEngine(TIMED, range(3, 99), StepCost(step_ns=1000, prefill_token_ns=10, decode_row_ns=7))
        engine.admit("a", 100, GREEDY)
        engine.admit("b", 100, GREEDY)
        assert await engine.prefill([Chunk("a", tokens(30)), Chunk("b", tokens(12))]) == 1000 + 42 * 10

    run_async(main())


def test_tokens_come_from_the_vocabulary_and_never_end(run_async: Run) -> None:
    async def main() -> None:
        engine = TimedEngine(TIMED, [5, 6, 7, 8])
        output = await generate(engine, "r", tokens(10), 400)
        assert set(output) == {5, 6, 7, 8}

    run_async(main())


def test_counts_add_up_to_the_tokens(run_async: Run) -> None:
    async def main() -> None:
        engine = TimedEngine(TIMED, range(3, 99), most_accepted=6)
        output = await generate(engine, "r", tokens(10), 400)
        drafted, verified, accepted = engine.counts
        assert 0 < accepted < drafted < verified
        num_tokens = 1 + (verified - drafted) + accepted  # the first one, one a row fed, and those foreseen
        assert len(output) <= num_tokens < len(output) + 6

    run_async(main())


def test_one_in_mean_output_ends(run_async: Run) -> None:
    async def main() -> None:
        engine = TimedEngine(TIMED, range(3, 99), mean_output=20)
        output = await generate(engine, "r", tokens(10), 4000, WARM)
        assert 100 < output.count(TIMED.eos_token) < 300
        always = TimedEngine(TIMED, range(3, 99), mean_output=1)
        assert await generate(always, "r", tokens(10), 3) == [TIMED.eos_token] * 3

    run_async(main())


def test_every_prompt_token_and_its_place_matter(run_async: Run) -> None:
    async def main() -> None:
        engine = TimedEngine(dataclasses.replace(TIMED, num_slots=1), range(3, 2000))
        prompt = np.random.default_rng(0).integers(3, 2028, 12).astype(np.uint32)
        swapped, changed = prompt.copy(), prompt.copy()
        swapped[[0, 5]] = swapped[[5, 0]]
        changed[3] += 1
        outputs = [await generate(engine, "r", p, 8) for p in (prompt, swapped, changed, prompt[:-1], prompt[1:])]
        assert len({tuple(output) for output in outputs}) == 5
        assert await generate(engine, "r", prompt, 8, WARM) != outputs[0]
        assert await generate(engine, "r", prompt, 4) == GOLDEN

    run_async(main())


GOLDEN = [1918, 107, 342, 331]


def test_room_is_counted_in_blocks_and_grows_while_there_is_some() -> None:
    small = dataclasses.replace(TIMED, num_slots=4, capacity_tokens=3 * 128 + 100)
    engine = TimedEngine(small, vocabulary=range(3, 50))
    assert engine.admit("huge", 385, GREEDY) is Admission.NEVER
    assert engine.admit("a", 100, GREEDY) is Admission.OK and engine.admit("b", 129, GREEDY) is Admission.OK
    assert engine.admit("c", 1, GREEDY) is Admission.LATER
    assert engine.grow("a", 128) and not engine.grow("a", 129)
    engine.free("b")
    assert engine.grow("a", 384) and engine.admit("c", 1, GREEDY) is Admission.LATER
    engine.free("a")
    assert engine.admit("c", 384, GREEDY) is Admission.OK
