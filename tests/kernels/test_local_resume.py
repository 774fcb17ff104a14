"""What only the computing engine's blocks have: other arithmetic, numbers that are none, pools to give back."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Admission, Chunk, StateError
from kernels.local import LocalEngine
from kernels.model import ComputeDtype, Model
from kernels.schedule import Mode
from tests.conftest import Run
from tests.kernels.conftest import GOLDEN
from tests.kernels.test_engine import GREEDY, extend
from tests.kernels.test_local_drafts import SAMPLINGS, tokens
from tests.kernels.test_replay import prefix as compressed
from tests.kernels.test_resume import NUM_NEW, cold, generate, kept
from tests.untrained import untrained

MINI = GOLDEN / "mini"


def engine(*, drafts: Mode = "fixed") -> LocalEngine:
    return LocalEngine(MINI, num_slots=4, max_step_tokens=64, drafts=drafts)


def free_now(local: LocalEngine) -> tuple[int, int]:
    assert local._steps is not None
    return local._steps.pool.num_free, local._steps.pool.kv.num_free


@pytest.mark.parametrize("name", SAMPLINGS)
def test_with_drafts_and_without_on_either_side(run_debug: Run, name: str) -> None:
    """Blocks of an exact request are those of a bounded one; drafts are accepted behind them as if nothing were new."""

    async def main() -> None:
        source, plain, target = engine(), engine(drafts="off"), engine()
        for each in (source, plain, target):
            await each.start()
        assert source.info.space == plain.info.space and source.info.layout != plain.info.layout
        prompt, sampling = tokens(150), SAMPLINGS[name]
        state = await cold(source, "r", prompt, sampling)
        output = (await extend(source, ["r"], NUM_NEW))["r"]
        assert plain.admit("exact", 140, GREEDY) is Admission.OK
        await plain.prefill([Chunk("exact", prompt[:140])])
        prefix = await kept(plain, "exact", prompt, 1)
        assert prefix.payloads == await source.blocks("r", 0, 1)
        assert prefix.windows == await source.windows("r", 128)
        for each in (target, plain):
            assert each.admit("r", 150 + NUM_NEW, sampling, bounded_prompt=150) is Admission.OK
            assert await each.resume("r", prefix) == 128
        await target.prefill([Chunk("r", prompt[128:])])
        assert await target.export("r") == state
        counts = []
        found: list[int] = []
        while len(found) < NUM_NEW:
            found += (await target.decode(["r"]))[0]
            counts.append(len(found))
        assert found[:NUM_NEW] == output == await generate(plain, "r", prompt, 128)
        assert name != "hot" or len(counts) < NUM_NEW  # some were accepted
        for each in (source, plain, target):
            await each.close()

    run_debug(main())


def test_a_replay_is_the_models_replay(mini: Model, run_debug: Run) -> None:
    """Which golden numbers vouch for (`test_replay.py`)."""
    prompt = tokens(170)

    async def last_row() -> torch.Tensor:
        local = engine()
        await local.start()
        await cold(local, "r", prompt)
        assert local.admit("again", 180, GREEDY, bounded_prompt=170) is Admission.OK
        assert await local.resume("again", await kept(local, "r", prompt, 1, windows=False)) == 128 - 16
        await local.prefill([Chunk("again", prompt[128 - 16 :])])
        row = local._requests["again"].hidden
        await local.close()
        assert row is not None
        return row

    pool = StatePool(mini.config, 2, 200)
    source, slot = pool.alloc(), pool.alloc()
    mini.forward(Batch.last_rows([(source, 0, prompt.tolist())]), pool)
    pool.import_prefix(slot, compressed(pool.export(source), mini, 128))
    pool.plan_replay(slot, 170)
    rows = mini.forward(Batch.last_rows([(slot, 112, prompt[112:].tolist())]), pool)
    assert torch.equal(run_debug(last_row()), rows[0])


def test_pools_come_back_to_where_they_were(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        await cold(local, "r", tokens(150))
        good = await kept(local, "r", tokens(150), 1)
        baseline = free_now(local)
        bad = dataclasses.replace(good, windows=b"")
        foreign = dataclasses.replace(good, tokens=np.full(128, 256, np.uint32))
        cases = ((good, True), (bad, False), (dataclasses.replace(good, windows=None), True), (foreign, False))
        for prefix, is_good in cases:
            assert local.admit("again", 200, GREEDY, bounded_prompt=170) is Admission.OK
            assert free_now(local) == (baseline[0] - 1, baseline[1] - 2)
            if is_good:
                await local.resume("again", prefix)
            else:
                with pytest.raises(StateError):
                    await local.resume("again", prefix)
            local.free("again")
            assert free_now(local) == baseline
        await local.close()

    run_debug(main())


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
def test_a_block_of_nonsense_harms_nobody_else(run_debug: Run, byte: int) -> None:
    """Its request may end without numbers; its company, and the next ones in its slot and blocks, know nothing."""

    async def main() -> None:
        local = engine()
        await local.start()
        want = await cold(local, "good", tokens(150))
        for key in ("r", "good"):
            prefix = await kept(local, "good", tokens(150), 1)
            if key == "good":
                local.free("good")
            else:
                prefix = dataclasses.replace(prefix, payloads=[bytes([byte]) * local.info.block_bytes])
            assert local.admit(key, 150 + NUM_NEW, GREEDY, bounded_prompt=150) is Admission.OK
            assert await local.resume(key, prefix) == 128
        await local.prefill([Chunk(key, tokens(150)[128:]) for key in ("r", "good")])
        assert await local.export("good") == want
        for key in ("r", "good"):
            local.free(key)
        for number in range(4):  # every slot, and the blocks of either
            assert await cold(local, f"{number}", tokens(150)) == want
        await local.close()

    run_debug(main())


def test_the_space_tells_weights_and_arithmetic_apart(tmp_path: Path, run_debug: Run) -> None:
    async def space(folder: Path, dtype: ComputeDtype = "fp32") -> str:
        local = LocalEngine(folder, num_slots=1, max_step_tokens=64, compute_dtype=dtype)
        assert local.info.space == ""
        await local.start()
        await local.close()
        return local.info.space

    async def main() -> None:
        shutil.copytree(untrained(), tmp_path / "copy")
        shutil.copytree(untrained(), tmp_path / "tuned")
        weights = load_file(untrained() / "model.safetensors")
        weights["embed.weight"][0, 0] += 1
        save_file(weights, tmp_path / "tuned" / "model.safetensors")
        own = await space(untrained())
        assert own.startswith("blocks-1-") and len(own) < 50
        assert await space(tmp_path / "copy") == own
        assert len({own, await space(untrained(), "bf16"), await space(tmp_path / "tuned")}) == 3

    run_debug(main())
