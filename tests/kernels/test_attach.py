"""Images of a prompt through the engine contract: what computes reads them, what only spends time keeps the order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.engine import Admission, Chunk, Engine, ImageRows
from kernels.local import LocalEngine
from kernels.timed import TimedEngine
from tests.conftest import Run
from tests.kernels.test_engine import GREEDY, TIMED, extend
from tests.kernels.vision_set import FOLDER, PROMPTS, golden, images, span, tokens

IMAGE_TOKEN = 187


def engine() -> LocalEngine:
    return LocalEngine(FOLDER, num_slots=5, max_step_tokens=64)


def rows_of(prompt: str) -> list[ImageRows]:
    return [ImageRows(start, rows.tobytes()) for start, rows in images(prompt, 0)[0]]


async def begin(local: Engine, prompt: str) -> None:
    assert local.admit(prompt, len(tokens(prompt)) + 16, GREEDY) is Admission.OK
    local.attach(prompt, rows_of(prompt))


@pytest.mark.oracle
@pytest.mark.parametrize("cut", [64, 5])
def test_golden_tokens_together_and_in_any_cut(run_debug: Run, cut: int) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        done = dict.fromkeys(PROMPTS, 0)
        for prompt in PROMPTS:
            await begin(local, prompt)
        while left := [prompt for prompt in PROMPTS if done[prompt] < len(tokens(prompt))]:
            chunks = []
            for prompt in left:
                piece = tokens(prompt)[done[prompt] : done[prompt] + cut]
                chunks.append(Chunk(prompt, np.array(piece, np.uint32)))
                done[prompt] += len(piece)
            await local.prefill(chunks)
        found = await extend(local, PROMPTS, 16)
        for prompt in PROMPTS:
            assert found[prompt] == golden()[f"{prompt}.greedy_intended_tokens_fp32"].tolist()
        await local.close()

    run_debug(main())


@pytest.mark.oracle
def test_generation_goes_on_where_the_state_is_taken(run_debug: Run) -> None:
    """Embeddings are no part of a state: once their rows are computed, nobody needs them."""

    async def main() -> None:
        local, other = engine(), engine()
        await local.start()
        await other.start()
        await begin(local, "v2")
        await local.prefill([Chunk("v2", np.array(tokens("v2"), np.uint32))])
        other.admit("v2", len(tokens("v2")) + 16, GREEDY)
        await other.restore("v2", await local.export("v2"))
        found = await extend(other, ["v2"], 16)
        assert found["v2"] == golden()["v2.greedy_intended_tokens_fp32"].tolist()
        await local.close()
        await other.close()

    run_debug(main())


@pytest.mark.parametrize(
    ("attached", "why"),
    [
        ([ImageRows(0, b"x" * 257)], "not rows of 256"),
        ([ImageRows(0, b"")], "not rows of 256"),
        ([ImageRows(-1, span(0).tobytes())], "begins within"),
        ([ImageRows(2, span(0).tobytes()), ImageRows(9, span(1).tobytes())], "begins within"),
        ([ImageRows(9, span(1).tobytes()), ImageRows(2, span(0).tobytes())], "begins within"),
        ([ImageRows(33, span(0).tobytes())], "reach position 41, the request reserved 40"),
        ([ImageRows(0, np.full((8, 64), np.nan, np.float32).tobytes())], "not finite"),
    ],
)
def test_refused_images_change_nothing(run_debug: Run, attached: list[ImageRows], why: str) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        local.admit("r", 40, GREEDY)
        with pytest.raises(ValueError, match=why):
            local.attach("r", attached)
        await local.prefill([Chunk("r", np.arange(5, 25, dtype=np.uint32))])
        await local.close()

    run_debug(main())


def test_an_image_that_was_not_given_is_not_made_up(run_debug: Run) -> None:
    """Refused, with its company, before anything changes."""

    async def main() -> None:
        local, prompt = engine(), tokens("v2")
        await local.start()
        (first, rows), (second, _) = images("v2", 0)[0]
        for key in ("r", "other"):
            local.admit(key, len(prompt) + 16, GREEDY)
        local.attach("r", [ImageRows(first, rows.tobytes())])
        await local.prefill([Chunk("r", np.array(prompt[: first + 3], np.uint32))])
        left = Chunk("r", np.array(prompt[first + 3 :], np.uint32))
        text = Chunk("other", np.arange(5, 9, dtype=np.uint32))
        with pytest.raises(ValueError, match=f"request r: the image at position {second} was not attached"):
            await local.prefill([text, left])
        await local.prefill([text, Chunk("r", left.tokens[: second - first - 3])])
        assert await local.export("r") != b""
        await local.close()

    run_debug(main())


def test_an_image_stands_where_image_tokens_do(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        local.admit("r", 40, GREEDY)
        local.attach("r", [ImageRows(3, span(0).tobytes())])
        wrong = np.array([5, 6, 7, *[IMAGE_TOKEN] * 7, 8, 9], np.uint32)
        with pytest.raises(ValueError, match="no image tokens where its image at position 3 is"):
            await local.prefill([Chunk("r", wrong)])
        await local.prefill([Chunk("r", wrong[:7])])
        with pytest.raises(ValueError, match="no image tokens"):
            await local.prefill([Chunk("r", wrong[7:])])
        await local.prefill([Chunk("r", np.array([IMAGE_TOKEN] * 4 + [9], np.uint32))])
        assert len((await local.decode(["r"]))[0]) >= 1
        await local.close()

    run_debug(main())


def test_an_image_that_overflows_ends_with_its_request(run_debug: Run) -> None:
    """Its rows are finite, what the layers make of them is not; the next request in the slot reads none of it."""

    async def main() -> None:
        local = LocalEngine(FOLDER, num_slots=1, max_step_tokens=64)
        await local.start()

        async def generate(text: list[int], images: list[ImageRows]) -> list[int]:
            assert local.admit("r", 60, GREEDY) is Admission.OK
            try:
                local.attach("r", images)
                await local.prefill([Chunk("r", np.array(text, np.uint32))])
                return [token for _ in range(3) for token in (await local.decode(["r"]))[0]]
            finally:
                local.free("r")

        text = list(range(5, 35))
        want = await generate(text, [])
        huge = np.full(span(0).shape, 3e38, np.float32)
        assert await generate([5, 6, 7, *[IMAGE_TOKEN] * len(huge), *text], [ImageRows(3, huge.tobytes())]) == []
        assert await generate(text, []) == want
        await local.close()

    run_debug(main())


@pytest.mark.parametrize("make", [engine, lambda: TimedEngine(TIMED, range(3, 99))])
def test_only_before_the_first_chunk(run_debug: Run, make: Callable[[], Engine]) -> None:
    async def main() -> None:
        either = make()
        await either.start()
        with pytest.raises(KeyError):
            either.attach("r", rows_of("v0"))
        either.admit("r", 40, GREEDY)
        either.attach("r", rows_of("v0"))
        await either.prefill([Chunk("r", np.array(tokens("v0"), np.uint32))])
        with pytest.raises(ValueError, match="has state already"):
            either.attach("r", rows_of("v0"))
        await either.close()

    run_debug(main())


def test_a_model_without_vision_takes_none(run_debug: Run) -> None:
    async def main() -> None:
        local = LocalEngine(FOLDER.parent / "mini", num_slots=1, max_step_tokens=64)
        await local.start()
        local.admit("r", 40, GREEDY)
        with pytest.raises(ValueError, match="mini has no vision"):
            local.attach("r", rows_of("v0"))
        await local.close()

    run_debug(main())
