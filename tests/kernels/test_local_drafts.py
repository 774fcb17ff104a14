"""The engine with draft stages: other numbers of steps, never other tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Admission, Chunk, Sampling, Tokens
from kernels.local import LocalEngine
from kernels.model import Model
from kernels.schedule import Mode
from tests.conftest import Run
from tests.kernels.conftest import GOLDEN
from tests.kernels.test_engine import extend

MINI = GOLDEN / "mini"
NUM_NEW = 20
# Noise that outweighs the logits makes draft and target agree often, though the weights are random.
SAMPLINGS = {"greedy": Sampling(0.0, 1.0, 0), "warm": Sampling(1.0, 0.9, 5), "hot": Sampling(30.0, 1.0, 2**63 - 1)}


def engine(*, drafts: Mode = "fixed", folder: Path = MINI) -> LocalEngine:
    return LocalEngine(folder, num_slots=4, max_step_tokens=64, drafts=drafts)


def tokens(num_tokens: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, 256, num_tokens).astype(np.uint32)


def prompts() -> dict[str, Tokens]:
    return {name: tokens(length, length) for name, length in zip(SAMPLINGS, (5, 37, 61), strict=True)}


async def begin(local: LocalEngine, *, room: int = NUM_NEW) -> None:
    for name, prompt in prompts().items():
        admission = local.admit(name, len(prompt) + room, SAMPLINGS[name], bounded_prompt=len(prompt))
        assert admission is Admission.OK
    await local.prefill([Chunk(name, prompt) for name, prompt in prompts().items()])


async def outputs(local: LocalEngine) -> dict[str, list[int]]:
    await local.start()
    await begin(local)
    new = await extend(local, list(SAMPLINGS), NUM_NEW)
    await local.close()
    return new


def test_drafts_change_no_token_and_save_steps(run_debug: Run) -> None:
    async def main() -> None:
        plain = await outputs(engine(drafts="off"))
        assert await outputs(engine()) == plain
        local = engine()
        await local.start()
        await begin(local)
        counts = [len(new) for _ in range(3) for new in await local.decode(["hot"])]
        assert counts[0] == 1  # the first token comes from the prompt's last row
        assert max(counts) > 2
        await local.close()

    run_debug(main())


@pytest.mark.parametrize("room", [1, 2, 4])
def test_drafts_stay_within_what_is_reserved(room: int, run_debug: Run) -> None:
    async def main() -> None:
        local, plain = engine(), engine(drafts="off")
        for each in (local, plain):
            await each.start()
            await begin(each, room=room)
        assert await extend(local, list(SAMPLINGS), room + 1) == await extend(plain, list(SAMPLINGS), room + 1)
        with pytest.raises(ValueError, match="are needed"):
            await extend(local, ["hot"], 1)
        for each in (local, plain):
            await each.close()

    run_debug(main())


def test_a_moved_request_takes_its_draft_windows_along(run_debug: Run) -> None:
    async def main() -> None:
        plain = await outputs(engine(drafts="off"))
        source, target = engine(), engine()
        await source.start()
        await target.start()
        await begin(source)
        before = {name: list[int]() for name in SAMPLINGS}
        for _ in range(2):
            for name, new in zip(SAMPLINGS, await source.decode(list(SAMPLINGS)), strict=True):
                before[name] += new
        for name, prompt in prompts().items():
            assert target.admit(name, len(prompt) + NUM_NEW, SAMPLINGS[name]) is Admission.OK
            await target.restore(name, await source.export(name))
        for name in SAMPLINGS:
            left = NUM_NEW - len(before[name])
            assert before[name] + (await extend(target, [name], left))[name] == plain[name]
            # Both sides step alike, so the windows that the drafts read are the same ones.
            assert (await extend(source, [name], left))[name] == plain[name][len(before[name]) :]
            assert await source.export(name) == await target.export(name)
        await source.close()
        await target.close()

    run_debug(main())


def test_state_with_and_without_draft_windows_is_told_apart() -> None:
    assert engine().info.layout != engine(drafts="off").info.layout


def test_a_bounded_prompt_is_the_models_bounded_replay(mini: Model, run_debug: Run) -> None:
    """And another computation than the exact one, from the first row that sees beyond the last window."""
    prompt = prompts()["hot"]

    async def first_rows() -> list[torch.Tensor]:
        local = engine(drafts="off")
        await local.start()
        rows = []
        for name, bounded in (("bounded", len(prompt)), ("exact", 0)):
            assert local.admit(name, 70, SAMPLINGS["greedy"], bounded_prompt=bounded) is Admission.OK
            await local.prefill([Chunk(name, prompt)])
            hidden = local._requests[name].hidden
            assert hidden is not None
            rows.append(hidden)
        await local.close()
        return rows

    bounded, exact = run_debug(first_rows())
    pool = StatePool(mini.config, 2, 70)
    for row, length in ((bounded, len(prompt)), (exact, 0)):
        slot = pool.alloc()
        if length:
            pool.plan_replay(slot, length)
        assert torch.equal(row, mini.forward(Batch.last_rows([(slot, 0, prompt.tolist())]), pool)[0])
    assert not torch.equal(bounded, exact)
