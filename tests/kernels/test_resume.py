"""What is kept of one request spares another the same work, and changes none of its tokens: both engines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from kernels.engine import Admission, Buffer, Chunk, Engine, ImageRows, Prefix, Sampling, StateError, Tokens
from kernels.seal import seal
from kernels.timed import TimedEngine
from run.checkpoint import VOCAB_SIZE
from run.tokenizer import CONTROL, IMAGE
from tests.kernels.test_engine import GREEDY, TIMED, WARM, Make, extend, local, timed, timed_with_drafts, tokens

NUM_NEW = 12
IMAGE_TOKEN = VOCAB_SIZE - len(CONTROL) + [name for name, _ in CONTROL].index(IMAGE)


def images(*starts: int) -> list[ImageRows]:
    rows = np.random.default_rng(3).standard_normal((len(starts), 20, 128)).astype(np.float32)
    return [ImageRows(start, one.tobytes()) for start, one in zip(starts, rows, strict=True)]


def drive(make: Make, body: Callable[[Engine, Engine], Awaitable[None]]) -> None:
    """With an engine that computes from the start, and one that goes on from what is kept."""

    async def main() -> None:
        source, target = make(), make()
        await source.start()
        await target.start()
        try:
            await body(source, target)
        finally:
            await source.close()
            await target.close()

    asyncio.run(main(), debug=True)


async def compute(engine: Engine, key: str, prompt: Tokens, start: int, cut: int = 0) -> None:
    for first in range(start, len(prompt), cut or len(prompt)):
        await engine.prefill([Chunk(key, prompt[first : first + (cut or len(prompt))])])


async def cold(
    engine: Engine, key: str, prompt: Tokens, sampling: Sampling = GREEDY, attached: list[ImageRows] | None = None
) -> bytes:
    """Admit and compute from the start; the state."""
    assert engine.admit(key, len(prompt) + NUM_NEW, sampling, bounded_prompt=len(prompt)) is Admission.OK
    if attached:
        engine.attach(key, attached)
    await compute(engine, key, prompt, 0)
    return await engine.export(key)


async def kept(engine: Engine, key: str, prompt: Tokens, num_blocks: int, *, windows: bool = True) -> Prefix:
    end = 128 * num_blocks
    found = await engine.windows(key, end) if windows else None
    assert (found is not None) == windows
    return Prefix(prompt[:end], await engine.blocks(key, 0, num_blocks), found)


async def generate(engine: Engine, key: str, prompt: Tokens, start: int, cut: int = 0) -> list[int]:
    await compute(engine, key, prompt, start, cut)
    return (await extend(engine, [key], NUM_NEW))[key]


@pytest.mark.parametrize("make", [local, timed, timed_with_drafts])
class TestResume:
    @pytest.mark.parametrize("sampling", [GREEDY, WARM])
    def test_a_resumed_request_is_a_cold_one(self, make: Make, sampling: Sampling) -> None:
        """State and tokens, from another engine's blocks, at either of the last two ends, in a batch, in any cut."""

        async def body(source: Engine, target: Engine) -> None:
            assert source.info.space == target.info.space != ""
            # The prompt, and the one it goes on from: at least up to the end of these blocks.
            cases = {"a": (384, 256, 2), "b": (385, 300, 1), "c": (511, 511, 2), "d": (300, 300, 1)}
            prompts = {key: tokens(length, length) for key, (length, _, _) in cases.items()}
            want = {key: await cold(source, key, prompt, sampling) for key, prompt in prompts.items()}
            output = await extend(source, list(prompts), NUM_NEW)
            starts = {}
            for key, (length, computed, num_blocks) in cases.items():
                await cold(source, "kept", prompts[key][:computed], WARM)
                prefix = await kept(source, "kept", prompts[key], num_blocks)
                source.free("kept")
                assert target.admit(key, length + NUM_NEW, sampling, bounded_prompt=length) is Admission.OK
                starts[key] = await target.resume(key, prefix)
                assert starts[key] == 128 * num_blocks
            chunks = [Chunk(key, prompts[key][starts[key] :]) for key in ("a", "c", "d")]
            await target.prefill([Chunk("b", prompts["b"][starts["b"] :][:101]), *chunks])
            await target.prefill([Chunk("b", prompts["b"][starts["b"] + 101 :])])
            for key in cases:
                assert await target.export(key) == want[key]
                num_blocks = len(prompts[key]) // 128
                assert await target.blocks(key, 0, num_blocks) == await source.blocks(key, 0, num_blocks)
                assert await target.windows(key, 128 * num_blocks) == await source.windows(key, 128 * num_blocks)
            assert await extend(target, list(reversed(cases)), NUM_NEW) == output

        drive(make, body)

    def test_a_replay_is_the_same_every_time_and_rewrites_nothing(self, make: Make) -> None:
        async def body(source: Engine, target: Engine) -> None:
            prompt = tokens(450)
            await cold(source, "r", prompt)
            prefix = await kept(source, "r", prompt, 2, windows=False)
            states, outputs = [], []
            for engine, cut in ((target, 0), (target, 37), (source, 131)):
                assert engine.admit("again", 450 + NUM_NEW, GREEDY, bounded_prompt=450) is Admission.OK
                assert await engine.resume("again", prefix) == 128
                with pytest.raises(ValueError, match="128 tokens are computed"):
                    await engine.blocks("again", 1, 1)
                assert await engine.windows("again", 128) is None
                await compute(engine, "again", prompt, 128, cut)
                states.append(await engine.export("again"))
                assert await engine.blocks("again", 0, 2) == prefix.payloads
                outputs.append((await extend(engine, ["again"], NUM_NEW))["again"])
                windows = await engine.windows("again", 384)
                assert windows is not None
                engine.free("again")
            assert states[1:] == states[:1] * 2 and outputs[1:] == outputs[:1] * 2

        drive(make, body)

    @pytest.mark.parametrize("length", [256, 257, 320, 383])
    def test_windows_are_there_at_the_last_two_ends(self, make: Make, length: int) -> None:
        """And are those of a request that has just come to that end."""

        async def body(source: Engine, target: Engine) -> None:
            prompt = tokens(length)
            await cold(source, "long", prompt)
            for end in (256, 128):
                await cold(target, f"{end}", prompt[:end])
                assert await source.windows("long", end) == await target.windows(f"{end}", end) is not None

        drive(make, body)

    def test_blocks_and_windows_of_generated_tokens_are_those_of_a_prompt(self, make: Make) -> None:
        """Also behind a move, with which only the last window comes along."""

        async def body(source: Engine, target: Engine) -> None:
            sampling = Sampling(30.0, 1.0, 7)  # so that drafts are accepted, and taken back
            prompt = tokens(200)
            for engine in (source, target):
                assert engine.admit("r", 400, sampling, bounded_prompt=200 * (engine is source)) is Admission.OK
            await source.prefill([Chunk("r", prompt)])
            await target.restore("r", await source.export("r"))
            assert await target.windows("r", 128) is None
            assert await target.blocks("r", 0, 1) == await source.blocks("r", 0, 1)
            new: list[int] = []
            while len(new) < 195:
                new += (await target.decode(["r"]))[0]
            whole = np.concatenate([prompt, np.array(new, dtype=np.uint32)])[: 200 + len(new) - 1]
            await cold(source, "whole", whole)
            assert await target.blocks("r", 0, 3) == await source.blocks("whole", 0, 3)
            for end in (256, 384):
                assert await target.windows("r", end) == await source.windows("whole", end) is not None
            with pytest.raises(ValueError, match="blocks 3 \\+ 1 are not"):
                await target.blocks("r", 3, 1)

        drive(make, body)

    def test_windows_that_are_gone_are_none(self, make: Make) -> None:
        async def body(source: Engine, target: Engine) -> None:
            prompt = tokens(900)
            await cold(source, "r", prompt)
            assert [await source.windows("r", end) is None for end in (128, 256, 384, 512, 768, 896)] == [
                *(True, True, True, True),
                *(False, False),
            ]
            assert target.admit("r", 900, GREEDY, bounded_prompt=900) is Admission.OK
            assert await target.resume("r", await kept(source, "r", prompt, 6)) == 768
            assert await target.windows("r", 640) is None
            assert await target.windows("r", 768) == await source.windows("r", 768)
            for wrong in (0, -128, 100, 896):
                with pytest.raises(ValueError, match="no whole blocks|768 tokens are computed"):
                    await target.windows("r", wrong)
            for first, num in ((-1, 1), (5, 2), (0, 7), (6, -7)):
                with pytest.raises(ValueError, match="768 tokens are computed"):
                    await target.blocks("r", first, num)
            assert await target.blocks("r", 6, 0) == []
            with pytest.raises(KeyError):
                await target.blocks("x", 0, 1)
            with pytest.raises(KeyError):
                await target.windows("x", 128)

        drive(make, body)

    def test_what_is_not_the_prefix_is_refused_and_the_slot_stays(self, make: Make) -> None:
        async def body(source: Engine, target: Engine) -> None:
            prompt = tokens(400)
            want = await cold(source, "r", prompt)
            good = await kept(source, "r", prompt, 2)
            other_end = await source.windows("r", 384)
            assert good.windows is not None and other_end is not None
            flipped = bytearray(good.windows)
            flipped[-1] ^= 1
            bad: dict[str, bytes | None] = {
                "end of 384 tokens": other_end,
                "layout 'blocks of others'": seal("blocks of others", b""),
                "checksum does not match": bytes(flipped),
                "shorter than its header": b"",
                "layout": await source.export("r"),
                "windows of 8 bytes": seal(source.info.space, good.windows[-8:]),
            }
            assert target.admit("r", 400 + NUM_NEW, GREEDY, bounded_prompt=400) is Admission.OK
            for reason, windows in bad.items():
                with pytest.raises(StateError, match=reason):
                    await target.resume("r", dataclasses.replace(good, windows=windows))
            for payload in (b"", good.payloads[1][:-1], bytes(good.payloads[1]) + b"x"):
                with pytest.raises(StateError, match=f"block 1 has {len(payload)} bytes"):
                    await target.resume("r", dataclasses.replace(good, payloads=[good.payloads[0], payload]))
            for wrong in (prompt[:0], prompt[:128], prompt[:255]):
                with pytest.raises(ValueError, match=f"prefix of {len(wrong)} tokens has 2 blocks"):
                    await target.resume("r", dataclasses.replace(good, tokens=wrong))
            with pytest.raises(KeyError):
                await target.resume("x", good)
            for key, bounded in (("exact", 0), ("short", 383)):
                assert target.admit(key, 400, GREEDY, bounded_prompt=bounded) is Admission.OK
                with pytest.raises(ValueError, match="less than a window"):
                    await target.resume(key, good)
            assert await target.resume("r", good) == 256
            with pytest.raises(ValueError, match="state already"):
                await target.resume("r", good)
            await compute(target, "r", prompt, 256)
            assert await target.export("r") == want

        drive(make, body)

    @pytest.mark.parametrize(("windows", "num_behind"), [(True, 0), (True, 10), (False, 0)])
    def test_images_that_are_wholly_restored_need_not_be_given(
        self, make: Make, windows: bool, num_behind: int
    ) -> None:
        """One ends just where computation goes on, or reaches past it. All is as if they had been given."""

        async def body(source: Engine, target: Engine) -> None:
            end = 128 * (1 + windows)
            prompt, attached = tokens(420), images(20, end - 40, end - 20 + num_behind, 400)
            for image in attached:
                prompt[image.start : image.start + 20] = IMAGE_TOKEN
            whole = await cold(source, "r", prompt, attached=attached)
            prefix = await kept(source, "r", prompt, 2, windows=windows)
            found = []
            for given in (attached, attached[2 if num_behind else 3 :]):
                assert target.admit("r", 420, GREEDY, bounded_prompt=420) is Admission.OK
                target.attach("r", given)
                assert await target.resume("r", prefix) == end
                await compute(target, "r", prompt, end, 150)
                state = await target.export("r")
                assert state == whole or not windows
                found.append((state, await target.blocks("r", 0, 3)))
                target.free("r")
            assert found[0] == found[1]

        drive(make, body)

    @pytest.mark.parametrize("windows", [True, False])
    def test_images_before_and_behind_the_end_of_the_prefix(self, make: Make, windows: bool) -> None:
        """One lies in the prefix, one across its end, one behind it; blocks carry what the first two are."""

        async def body(source: Engine, target: Engine) -> None:
            prompt, attached = tokens(420), images(20, 240, 300)
            for image in attached:
                prompt[image.start : image.start + 20] = IMAGE_TOKEN
            want = await cold(source, "r", prompt, attached=attached)
            output = (await extend(source, ["r"], NUM_NEW))["r"]
            assert target.admit("r", 420 + NUM_NEW, GREEDY, bounded_prompt=420) is Admission.OK
            target.attach("r", attached)
            start = await target.resume("r", await kept(source, "r", prompt, 2, windows=windows))
            assert start == 128 * (1 + windows)
            await compute(target, "r", prompt, start, 50)
            if windows:
                assert await target.export("r") == want
                assert (await extend(target, ["r"], NUM_NEW))["r"] == output
            await cold(target, "others", prompt, attached=[*attached[:2], images(300, 300)[1]])
            await cold(target, "first", prompt, attached=[images(20, 20)[1], *attached[1:]])
            blocks = await source.blocks("r", 0, 3)
            assert await target.blocks("others", 0, 2) == blocks[:2]
            assert (await target.blocks("others", 2, 1))[0] != blocks[2]
            assert all(a != b for a, b in zip(await target.blocks("first", 0, 3), blocks, strict=True))

        drive(make, body)


@pytest.mark.parametrize("make", [local, timed])
def test_windows_missing_stale_or_misaligned(make: Make) -> None:
    """What the seal can tell is refused; rows of another prompt, rightly sealed, it cannot, and they do change what is
    computed: so it matters that handles are checked."""

    async def body(source: Engine, target: Engine) -> None:
        prompt = tokens(400)
        await cold(target, "before", tokens(520, 8))  # the slot has been in use
        target.free("before")
        want = await cold(source, "r", prompt)
        good = await kept(source, "r", prompt, 2)
        await cold(source, "other", tokens(400, 9))
        assert good.windows is not None
        replays = []
        for damage, windows in {
            "none": good.windows,
            "missing": None,
            "zeroed": bytes(len(good.windows)),
            "misaligned": await source.windows("r", 384),
            "stale": await source.windows("other", 256),
        }.items():
            assert target.admit("r", 400 + NUM_NEW, GREEDY, bounded_prompt=400) is Admission.OK
            if damage in ("zeroed", "misaligned"):
                with pytest.raises(StateError):
                    await target.resume("r", dataclasses.replace(good, windows=windows))
                windows = None
            start = await target.resume("r", dataclasses.replace(good, windows=windows))
            assert start == (128 if windows is None else 256), damage
            await compute(target, "r", prompt, start)
            assert await target.blocks("r", 0, 2) == good.payloads
            state = await target.export("r")
            if damage == "none":
                assert state == want
            elif damage == "stale":
                assert state != want
                assert await target.windows("r", 384) != await source.windows("r", 384)
            else:
                replays.append(state)
            target.free("r")
        assert replays[1:] == replays[:1] * 2

    drive(make, body)


def test_the_timed_engine_shows_blocks_of_other_images_that_were_not_given() -> None:
    """Alone, among right ones, and with windows of either; text in the place of an image is another block, too."""

    async def body(source: Engine, target: Engine) -> None:
        prompt = tokens(700)
        ours, theirs = [images(0, start, 500)[1:] for start in (150, 150)]
        theirs = [ImageRows(150, bytes(len(theirs[0].embeddings))), theirs[1]]
        want = b""
        kept_of = {}
        for key, attached in (("ours", ours), ("theirs", theirs), ("none", ours[1:])):
            state = await cold(source, key, prompt, attached=attached)
            want = want or state
            kept_of[key] = await kept(source, key, prompt, 4)
        good = kept_of["ours"]

        async def resumed(payloads: Sequence[Buffer], windows: bytes | None, given: list[ImageRows]) -> bytes:
            assert target.admit("r", 700 + NUM_NEW, GREEDY, bounded_prompt=700) is Admission.OK
            target.attach("r", given)
            start = await target.resume("r", Prefix(good.tokens, payloads, windows))
            await compute(target, "r", prompt, start)
            state = await target.export("r")
            target.free("r")
            return state

        right = list(good.payloads)
        assert await resumed(right, good.windows, ours[1:]) == want == await resumed(right, None, ours[1:])
        for key in ("theirs", "none"):
            wrong = list(kept_of[key].payloads)
            assert wrong[0] == right[0] and wrong[1] != right[1]
            for windows in (None, good.windows, kept_of[key].windows):
                mixed = [[*right[:1], wrong[1], *right[2:]], [*right[:3], wrong[3]]]
                for payloads in (wrong, *mixed):
                    assert await resumed(payloads, windows, ours[1:]) != want
            assert await resumed(right, kept_of[key].windows, ours[1:]) != want

    drive(lambda: TimedEngine(TIMED, range(3, 2028)), body)


@pytest.mark.parametrize("damage", ["flipped", "swapped", "doubled", "of others", "of later", "windows"])
def test_the_timed_engine_shows_wrong_blocks_in_every_token(damage: str) -> None:
    async def body(source: Engine, target: Engine) -> None:
        prompt = tokens(700)
        await cold(source, "r", prompt)
        want = (await extend(source, ["r"], NUM_NEW))["r"]
        await cold(source, "other", np.concatenate([tokens(128, 9), prompt[128:]]))
        good, others = await kept(source, "r", prompt, 4), await kept(source, "other", prompt, 4)
        blocks, windows = [bytes(payload) for payload in good.payloads], good.windows
        match damage:
            case "flipped":
                blocks[2] = blocks[2][:37] + bytes([blocks[2][37] ^ 16]) + blocks[2][38:]
            case "swapped":
                blocks[0], blocks[3] = blocks[3], blocks[0]
            case "doubled":
                blocks[1] = blocks[0]
            case "of others":
                blocks[3] = bytes(others.payloads[3])  # the same tokens in the same place, after others
            case "of later":
                blocks[3] = (await source.blocks("r", 4, 1))[0]
            case "windows":
                windows = others.windows
        for prefix in (Prefix(good.tokens, blocks, windows), Prefix(good.tokens, blocks, None)):
            assert target.admit("r", 700 + NUM_NEW, GREEDY, bounded_prompt=700) is Admission.OK
            output = await generate(target, "r", prompt, await target.resume("r", prefix))
            target.free("r")
            if damage == "windows" and prefix.windows is None:
                assert output == want
            else:
                assert sum(a == b for a, b in zip(output, want, strict=True)) < 3
        assert target.admit("r", 700 + NUM_NEW, GREEDY, bounded_prompt=700) is Admission.OK
        assert await generate(target, "r", prompt, await target.resume("r", good)) == want

    drive(lambda: TimedEngine(TIMED, range(3, 2028)), body)
