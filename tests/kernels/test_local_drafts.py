"""The engine with draft stages: other numbers of steps, never other tokens."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Admission, Chunk, Sampling, StateError, Tokens
from kernels.keys import ConfigError
from kernels.local import LocalEngine
from kernels.model import Model
from kernels.schedule import History, Mode, Scheduler
from kernels.seal import seal, unseal
from kernels.steptimes import Floats
from tests.conftest import Run
from tests.kernels.conftest import GOLDEN
from tests.kernels.test_engine import extend

MINI = GOLDEN / "mini"
NUM_NEW = 20
# Noise that outweighs the logits makes draft and target agree often, though the weights are random.
SAMPLINGS = {"greedy": Sampling(0.0, 1.0, 0), "warm": Sampling(1.0, 0.9, 5), "hot": Sampling(30.0, 1.0, 2**63 - 1)}


def engine(*, drafts: Mode = "fixed", folder: Path = MINI, scheduler: type[Scheduler] = Scheduler) -> LocalEngine:
    return LocalEngine(folder, num_slots=4, max_step_tokens=64, drafts=drafts, scheduler=scheduler)


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


class AnySchedule(Scheduler):
    """Drafts for some, verifies any part of it."""

    chance = random.Random(0)

    def choose(self, histories: Sequence[History], room: Sequence[int]) -> list[int]:
        return [number for number, most in enumerate(room) if most and self.chance.random() < 0.7]

    def admit(
        self, raw: Floats, lengths: Sequence[int], histories: Sequence[History], num_rows: int
    ) -> tuple[list[int], Floats]:
        _, confidence = super().admit(raw, lengths, histories, num_rows)
        return [self.chance.randint(0, most) for most in lengths], confidence


def test_drafts_change_no_token_and_save_steps(run_debug: Run) -> None:
    async def main() -> None:
        plain = await outputs(engine(drafts="off"))
        assert await outputs(engine()) == plain
        assert await outputs(engine(drafts="scheduled")) == plain
        assert await outputs(engine(scheduler=AnySchedule)) == plain
        local = engine()
        await local.start()
        await begin(local)
        counts = [len(new) for _ in range(3) for new in await local.decode(["hot"])]
        assert counts[0] == 1  # the first token comes from the prompt's last row
        assert max(counts) > 2
        await local.close()

    run_debug(main())


def test_counts_say_what_was_drafted_verified_and_accepted(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        await begin(local)
        await local.decode(list(SAMPLINGS))
        assert local.counts == (0, 0, 0)  # first tokens come from the prompts' last rows
        num_new = sum(map(len, await local.decode(list(SAMPLINGS))))
        assert local.counts == (15, 18, num_new - 3)
        await local.close()

    run_debug(main())


def test_how_drafts_of_a_request_fared_moves_with_it(run_debug: Run) -> None:
    async def main() -> None:
        source, target = engine(drafts="scheduled"), engine()
        for local in (source, target):
            await local.start()
        await begin(source)
        history = source._requests["hot"].history
        history.add(np.linspace(0.1, 0.5, 5))
        history.record.add(np.ones(5), 3, 1.0)
        await source.decode(["hot"])
        assert target.admit("hot", 200, SAMPLINGS["hot"]) is Admission.OK
        state = await source.export("hot")
        await target.restore("hot", state)
        moved = target._requests["hot"].history.dump()
        assert moved == history.dump()
        assert moved[:2] == [3.0, 4.0]
        assert len(moved) == 3 + 5
        target.free("hot")
        assert target.admit("hot", 200, SAMPLINGS["hot"]) is Admission.OK
        tensors = safetensors.torch.load(bytes(unseal(target.info.layout, state)))
        tensors["drafts"] = tensors["drafts"][:-1]
        with pytest.raises(StateError, match="history of drafts"):
            await target.restore("hot", seal(target.info.layout, safetensors.torch.save(tensors)))
        for _ in range(6):
            await source.decode(["hot"])
        assert history.record.promised not in (0.0, 4.0), "it goes on"
        for local in (source, target):
            await local.close()

    run_debug(main())


@pytest.mark.parametrize("told", [[1.0], [1.0, 1.0, 0.0, 1.0, 1.0], "warm"])
def test_temperatures_that_are_none_are_named(told: object, tmp_path: Path) -> None:
    shutil.copytree(MINI, tmp_path / "m")
    (tmp_path / "m" / "shoal.json").write_text(json.dumps({"confidence_temperatures": told}))
    with pytest.raises(ConfigError, match="confidence_temperatures must be 5 numbers"):
        engine(folder=tmp_path / "m")
    engine(folder=tmp_path / "m", drafts="off")


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
