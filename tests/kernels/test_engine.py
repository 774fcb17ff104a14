"""One contract, two engines: the same tests drive the one that computes and the one that only spends time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from kernels.engine import Admission, Chunk, Engine, EngineInfo, Sampling, StateError, Tokens
from kernels.local import LocalEngine
from kernels.timed import TimedEngine
from run.checkpoint import VOCAB_SIZE
from run.tokenizer import CONTROL
from tests.conftest import Run
from tests.untrained import untrained

NUM_SLOTS = 6
GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)
WARM = Sampling(temperature=1.0, top_p=0.9, seed=1234)
ORDINARY = range(3, VOCAB_SIZE - len(CONTROL))
TIMED = EngineInfo("shoal-tiny", "timed-1", VOCAB_SIZE, 1, 8192, NUM_SLOTS, 512, NUM_SLOTS * 8192, "blocks-1", 64)

Make = Callable[[], Engine]


def local() -> Engine:
    return LocalEngine(untrained(), num_slots=NUM_SLOTS, max_step_tokens=512)


def timed() -> Engine:
    return TimedEngine(TIMED, vocabulary=ORDINARY)


def timed_with_drafts() -> Engine:
    return TimedEngine(TIMED, vocabulary=ORDINARY, most_accepted=6)


def tokens(num_tokens: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(ORDINARY.start, ORDINARY.stop, num_tokens).astype(np.uint32)


async def generate(
    engine: Engine, key: str, prompt: Tokens, num_output: int, sampling: Sampling = GREEDY, *, cut: int = 0
) -> list[int]:
    """Admit, prefill in chunks of `cut` tokens (0: at once), generate, free."""
    assert engine.admit(key, len(prompt) + num_output, sampling) is Admission.OK
    for start in range(0, len(prompt), cut or len(prompt)):
        await engine.prefill([Chunk(key, prompt[start : start + (cut or len(prompt))])])
    output = await extend(engine, [key], num_output)
    engine.free(key)
    return output[key]


async def extend(engine: Engine, keys: Sequence[str], num_tokens: int) -> dict[str, list[int]]:
    """Step, turning the order round each time, until each has that many new tokens; the first so many of each."""
    output: dict[str, list[int]] = {key: [] for key in keys}
    while left := [key for key in keys if len(output[key]) < num_tokens]:
        for key, new in zip(left, await engine.decode(left), strict=True):
            output[key] += new
        keys = list(reversed(keys))
    return {key: tokens[:num_tokens] for key, tokens in output.items()}


async def step(engine: Engine, key: str, num_tokens: int) -> list[int]:
    return (await extend(engine, [key], num_tokens))[key]


@pytest.mark.parametrize("make", [local, timed, timed_with_drafts])
class TestEngine:
    def drive(self, make: Make, body: Callable[[Engine], Awaitable[None]]) -> None:
        async def main() -> None:
            engine = make()
            await engine.start()
            try:
                await body(engine)
            finally:
                await engine.close()

        asyncio.run(main(), debug=True)

    def test_info(self, make: Make) -> None:
        info = make().info
        assert info.model == "shoal-tiny"
        assert (info.vocab_size, info.eos_token, info.max_tokens, info.num_slots) == (VOCAB_SIZE, 1, 8192, NUM_SLOTS)
        assert info.layout == make().info.layout

    def test_a_life(self, make: Make, run_async: Run) -> None:
        async def main() -> None:
            engine = make()
            await engine.start()
            assert engine.admit("r", 40, WARM) is Admission.OK
            assert await engine.prefill([Chunk("r", tokens(20))]) >= 0
            output = await step(engine, "r", 12)
            assert len(output) == 12
            assert all(0 <= token < engine.info.vocab_size for token in output)
            engine.free("r")
            await engine.close()

        run_async(main())

    def test_admission(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            assert engine.admit("huge", engine.info.max_tokens + 1, GREEDY) is Admission.NEVER
            for number in range(NUM_SLOTS):
                assert engine.admit(f"r{number}", engine.info.max_tokens, GREEDY) is Admission.OK
            assert engine.admit("late", 1, GREEDY) is Admission.LATER
            assert engine.admit("huge", engine.info.max_tokens + 1, GREEDY) is Admission.NEVER
            with pytest.raises(KeyError):
                await engine.prefill([Chunk("late", tokens(1))])
            engine.free("r0")
            assert engine.admit("late", 1, GREEDY) is Admission.OK
            with pytest.raises(ValueError, match="already admitted"):
                engine.admit("late", 1, GREEDY)

        self.drive(make, body)

    def test_one_that_grows_makes_what_one_makes_that_had_all_its_room(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            prompt = tokens(125)
            whole = await generate(engine, "whole", prompt, 24)
            assert engine.admit("r", 126, GREEDY) is Admission.OK
            await engine.prefill([Chunk("r", prompt)])
            found: list[int] = []
            while len(found) < 24:
                assert engine.grow("r", len(prompt) + len(found)) and engine.grow("r", 1)  # no less than it has
                found += (await engine.decode(["r"]))[0]
            assert found[:24] == whole
            assert not engine.grow("r", engine.info.max_tokens + 1)
            with pytest.raises(KeyError):
                engine.grow("x", 1)
            with pytest.raises(ValueError, match="are needed"):
                while True:
                    await engine.decode(["r"])

        self.drive(make, body)

    def test_unknown_keys(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            assert engine.admit("known", 40, GREEDY) is Admission.OK
            await engine.prefill([Chunk("known", tokens(4))])
            with pytest.raises(KeyError):
                await engine.prefill([Chunk("known", tokens(4)), Chunk("x", tokens(4))])
            with pytest.raises(KeyError):
                await engine.decode(["known", "x"])
            with pytest.raises(KeyError):
                await engine.export("x")
            with pytest.raises(KeyError):
                await engine.restore("x", b"")
            # The refused steps changed nothing.
            assert await step(engine, "known", 5) == await generate(engine, "again", tokens(4), 5)

        self.drive(make, body)

    def test_free_is_idempotent_and_gives_the_slot_back(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            engine.free("never admitted")
            for _ in range(3 * NUM_SLOTS):
                assert engine.admit("r", 30, GREEDY) is Admission.OK
                await engine.prefill([Chunk("r", tokens(20))])
                engine.free("r")
                engine.free("r")
            assert all(engine.admit(f"r{number}", 1, GREEDY) is Admission.OK for number in range(NUM_SLOTS))

        self.drive(make, body)

    def test_calls_out_of_order(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            assert engine.admit("r", 10, GREEDY) is Admission.OK
            with pytest.raises(ValueError, match="no prompt"):
                await engine.decode(["r"])
            with pytest.raises(ValueError, match="no state"):
                await engine.export("r")
            with pytest.raises(ValueError, match="empty chunk"):
                await engine.prefill([Chunk("r", tokens(0))])
            with pytest.raises(ValueError, match="once only"):
                await engine.prefill([Chunk("r", tokens(2)), Chunk("r", tokens(2))])
            with pytest.raises(ValueError, match="reserved 10 tokens, 11 are needed"):
                await engine.prefill([Chunk("r", tokens(11))])
            await engine.prefill([Chunk("r", tokens(8))])
            await engine.decode(["r"])
            with pytest.raises(ValueError, match="generating already"):
                await engine.prefill([Chunk("r", tokens(1))])
            with pytest.raises(ValueError, match="once only"):
                await engine.decode(["r", "r"])
            with pytest.raises(ValueError, match="reserved 10 tokens, 11 are needed"):
                await step(engine, "r", 4)
            with pytest.raises(ValueError, match="state already"):
                await engine.restore("r", await engine.export("r"))
            assert await engine.decode([]) == []
            assert await engine.prefill([]) >= 0

        self.drive(make, body)

    @pytest.mark.parametrize("sampling", [GREEDY, WARM])
    def test_any_cut_and_any_batch_give_the_same_tokens(self, make: Make, sampling: Sampling) -> None:
        async def body(engine: Engine) -> None:
            prompts = {f"r{number}": tokens(length, number) for number, length in enumerate([1, 131, 40, 7])}
            alone = {key: await generate(engine, key, prompt, 6, sampling) for key, prompt in prompts.items()}
            assert await generate(engine, "cut", prompts["r1"], 6, sampling, cut=17) == alone["r1"]
            for key, prompt in prompts.items():
                assert engine.admit(key, len(prompt) + 6, sampling) is Admission.OK
            await engine.prefill([Chunk(key, prompt) for key, prompt in prompts.items()])
            assert await extend(engine, list(prompts), 6) == alone
            assert len({tuple(output) for output in alone.values()}) == len(alone)

        self.drive(make, body)

    @pytest.mark.parametrize("sampling", [GREEDY, WARM])
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_export_and_restore_at_any_point(self, make: Make, sampling: Sampling, num_steps: int) -> None:
        async def body(engine: Engine) -> None:
            prompt, output = tokens(133), list[int]()
            whole = await generate(engine, "whole", prompt, 14, sampling)
            other = make()
            await other.start()
            assert engine.admit("r", 133 + 14, sampling) is Admission.OK
            await engine.prefill([Chunk("r", prompt)])
            for _ in range(num_steps):
                (new,) = await engine.decode(["r"])
                output += new
            state = await engine.export("r")
            assert state == await engine.export("r")
            num_before = len(output)
            assert other.admit("neighbour", 200, WARM) is Admission.OK
            await other.prefill([Chunk("neighbour", tokens(20, 9))])
            assert other.admit("r", 133 + 14, sampling) is Admission.OK
            await other.restore("r", state)
            assert await other.export("r") == state
            output += (await extend(other, ["r", "neighbour"], 14 - num_before))["r"]
            assert output == whole
            # The source goes on as if nothing had happened.
            assert await step(engine, "r", 14 - num_before) == whole[num_before:]
            await other.close()

        self.drive(make, body)

    def test_prefill_goes_on_after_restore(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            prompt = tokens(150)
            whole = await generate(engine, "whole", prompt, 4)
            assert engine.admit("a", 154, GREEDY) is Admission.OK
            await engine.prefill([Chunk("a", prompt[:131])])
            assert engine.admit("b", 154, GREEDY) is Admission.OK
            await engine.restore("b", await engine.export("a"))
            await engine.prefill([Chunk("b", prompt[131:])])
            assert await step(engine, "b", 4) == whole

        self.drive(make, body)

    @pytest.mark.parametrize("sampling", [GREEDY, WARM])
    def test_a_bounded_prompt(self, make: Make, sampling: Sampling) -> None:
        """Any cut gives the same; it is left neither before its end, nor entered by the way of another's state."""

        async def body(engine: Engine) -> None:
            outputs = []
            for number, cut in enumerate([300, 128, 131, 299]):
                key = f"r{number}"
                assert engine.admit(key, 400, sampling, bounded_prompt=300) is Admission.OK
                for start in range(0, 300, cut):
                    if start:
                        with pytest.raises(ValueError, match=f"{start} of 300 prompt tokens"):
                            await engine.export(key)
                        with pytest.raises(ValueError, match=f"{start} of 300 prompt tokens"):
                            await engine.decode([key])
                    await engine.prefill([Chunk(key, tokens(300)[start : start + cut])])
                outputs.append(await step(engine, key, 8))
            assert outputs[1:] == outputs[:1] * 3
            with pytest.raises(ValueError, match="400 tokens for a prompt of 401"):
                engine.admit("long", 400, sampling, bounded_prompt=401)
            assert engine.admit("late", 400, sampling, bounded_prompt=300) is Admission.OK
            with pytest.raises(ValueError, match="computed from its start"):
                await engine.restore("late", await engine.export("r0"))
            engine.free("r1")
            assert engine.admit("other", 400, sampling) is Admission.OK
            await engine.restore("other", await engine.export("r0"))
            assert await step(engine, "other", 2) == await step(engine, "r0", 2)

        self.drive(make, body)

    def test_bad_states_are_refused_and_the_slot_stays(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            prompt = tokens(40)
            assert engine.admit("a", 60, GREEDY) is Admission.OK
            await engine.prefill([Chunk("a", prompt)])
            state = await engine.export("a")
            flipped = bytearray(state)
            flipped[-1] ^= 1
            foreign = TimedEngine(dataclasses.replace(TIMED, layout="other"), range(3, 99))
            foreign.admit("f", 60, GREEDY)
            await foreign.prefill([Chunk("f", prompt)])
            bad = {
                "shorter than its header": b"",
                "checksum": state[:-1],
                "checksum does not match": bytes(flipped),
                "first bytes": b"x" + state[1:],
                "layout 'other'": await foreign.export("f"),
            }
            assert engine.admit("b", 60, GREEDY) is Admission.OK
            for reason, damaged in bad.items():
                with pytest.raises(StateError, match=reason):
                    await engine.restore("b", damaged)
            assert engine.admit("small", 39, GREEDY) is Admission.OK
            with pytest.raises(StateError, match="does not fit"):
                await engine.restore("small", state)
            await engine.restore("b", state)
            assert await step(engine, "b", 4) == await step(engine, "a", 4)
            await engine.prefill([Chunk("small", prompt[:3])])

        self.drive(make, body)

    def test_a_cancelled_step_can_be_freed_at_once(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            expected = await generate(engine, "r", tokens(200), 3)
            assert engine.admit("r", 203, GREEDY) is Admission.OK
            task = asyncio.ensure_future(engine.prefill([Chunk("r", tokens(200, 5))]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.free("r")
            assert await generate(engine, "r", tokens(200), 3) == expected

        self.drive(make, body)

    def test_close_twice_and_without_start(self, make: Make) -> None:
        async def main() -> None:
            engine = make()
            await engine.close()
            await engine.close()
            engine = make()
            await engine.start()
            assert engine.admit("r", 9, GREEDY) is Admission.OK
            await engine.close()
            engine.free("r")
            await engine.close()

        asyncio.run(main(), debug=True)

    def test_rebuilding_from_prompt_and_output_gives_the_same_rest(self, make: Make) -> None:
        async def body(engine: Engine) -> None:
            prompt = tokens(50)
            whole = await generate(engine, "r", prompt, 10, WARM)
            longer = np.concatenate([prompt, np.array(whole[:4], dtype=np.uint32)])
            assert await generate(engine, "r", longer, 6, WARM) == whole[4:]

        self.drive(make, body)

    @pytest.mark.parametrize("cut", [293, 307])
    def test_rebuilding_behind_a_bounded_prompt_gives_the_same_rest(self, make: Make, cut: int) -> None:
        async def body(engine: Engine) -> None:
            prompt = tokens(300)
            assert engine.admit("r", 320, WARM, bounded_prompt=300) is Admission.OK
            await engine.prefill([Chunk("r", prompt)])
            whole = await step(engine, "r", 14)
            longer = np.concatenate([prompt, np.array(whole[:8], dtype=np.uint32)])
            assert engine.admit("again", 320, WARM, bounded_prompt=300) is Admission.OK
            await engine.prefill([Chunk("again", longer[:cut])])
            await engine.prefill([Chunk("again", longer[cut:])])
            assert await step(engine, "again", 6) == whole[8:14]

        self.drive(make, body)
