"""What only the computing engine has: its thread, its layout name, its refusals, its environment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import kernels.local
from kernels.checkpoint import CheckpointError
from kernels.config import ConfigError
from kernels.engine import Admission, Chunk, Sampling
from kernels.environment import compute_environment
from kernels.local import LocalEngine
from tests.conftest import Run
from tests.kernels.test_engine import GREEDY, generate, step, tokens
from tests.untrained import untrained


def engine(folder: Path | None = None, num_slots: int = 2) -> LocalEngine:
    return LocalEngine(folder or untrained(), num_slots=num_slots, max_step_tokens=512)


def test_the_loop_answers_while_a_step_computes(run_async: Run) -> None:
    async def main() -> int:
        local = engine()
        await local.start()
        assert local.admit("r", 512, GREEDY) is Admission.OK
        step = asyncio.ensure_future(local.prefill([Chunk("r", tokens(512))]))
        num_turns = 0
        while not step.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert await step > 0
        await local.close()
        return num_turns

    assert run_async(main()) > 20


def test_layout_tells_other_configurations_and_arithmetic_apart(tmp_path: Path) -> None:
    config = json.loads((untrained() / "config.json").read_text())
    config["text_config"]["sliding_window"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine(tmp_path).info.layout != engine().info.layout
    bf16 = LocalEngine(untrained(), num_slots=2, max_step_tokens=512, compute_dtype="bf16")
    assert bf16.info.layout != engine().info.layout
    assert engine(num_slots=9).info.layout == engine().info.layout
    assert engine(tmp_path).info.model == tmp_path.name


def test_a_bad_folder_is_named_and_close_still_works(tmp_path: Path, run_async: Run) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        engine(tmp_path)
    shutil.copy(untrained() / "config.json", tmp_path)
    shutil.copy(untrained() / "tokenizer.json", tmp_path)

    async def main() -> None:
        local = engine(tmp_path)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            await local.start()
        with pytest.raises(RuntimeError, match="not started"):
            local.admit("r", 1, GREEDY)
        await local.close()
        await local.close()

    run_async(main())


def test_a_used_slot_leaves_nothing_behind(run_debug: Run) -> None:
    async def main() -> None:
        local = engine(num_slots=1)
        await local.start()
        expected = await generate(local, "first", tokens(30), 5)
        await generate(local, "longer", tokens(300, 4), 8, Sampling(1.0, 1.0, 5))
        assert await generate(local, "again", tokens(30), 5) == expected
        await local.close()

    run_debug(main())


def test_blocks_limit_what_is_admitted_before_slots_do(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine(num_slots=2).info.capacity_tokens == 2 * 8192  # they are small: all slots can be full
    monkeypatch.setattr(kernels.local, "KV_BYTES", 0)

    async def main() -> None:
        local = LocalEngine(untrained(), num_slots=3, max_step_tokens=512)
        assert local.info.capacity_tokens == local.info.max_tokens
        await local.start()
        assert local.admit("half", 4096, GREEDY) is Admission.OK
        assert local.admit("more", 4097, GREEDY) is Admission.LATER
        assert local.admit("more", 8193, GREEDY) is Admission.NEVER
        assert await generate(local, "small", tokens(30), 5)  # a refused request left nothing behind
        assert local.admit("rest", 4096, GREEDY) is Admission.OK
        assert local.admit("one", 1, GREEDY) is Admission.LATER
        local.free("half")
        assert local.admit("one", 4096, GREEDY) is Admission.OK
        await local.close()

    run_async(main())


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """Finite weights can be too large for a token: here for token 9."""
    shutil.copytree(untrained(), tmp_path / "model")
    weights = load_file(untrained() / "model.safetensors")
    weights["embed.weight"][9] = 3e38
    save_file(weights, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_a_request_whose_numbers_overflow_while_it_generates_ends_alone(overflowing: Path, run_async: Run) -> None:
    async def main() -> None:
        local = engine(overflowing)
        await local.start()
        expected = await generate(local, "alone", np.full(20, 8, dtype=np.uint32), 6)
        for key in ("good", "bad"):
            assert local.admit(key, 30, GREEDY) is Admission.OK
        await local.prefill([Chunk(key, np.full(20, 8, dtype=np.uint32)) for key in ("bad", "good")])
        output = (await local.decode(["bad", "good"]))[1]
        local._requests["bad"].last = 9
        bad, good = await local.decode(["bad", "good"])
        assert bad == []
        local.free("bad")
        output += good + await step(local, "good", 6 - len(output) - len(good))
        assert output == expected
        await local.close()

    run_async(main())


def test_a_prompt_whose_numbers_overflow_is_not_exported(overflowing: Path, run_async: Run) -> None:
    """Whoever takes its state over would fail, with all its company."""

    async def main() -> None:
        local = engine(overflowing)
        await local.start()
        good, bad = np.full(20, 8, dtype=np.uint32), np.full(20, 9, dtype=np.uint32)
        for key in ("good", "bad"):
            assert local.admit(key, 30, GREEDY) is Admission.OK
        await local.prefill([Chunk("bad", bad), Chunk("good", good)])
        with pytest.raises(ValueError, match="bad: .* no numbers"):
            await local.export("bad")
        together = await local.export("good")
        local.free("bad")
        local.free("good")
        assert local.admit("alone", 30, GREEDY) is Admission.OK
        await local.prefill([Chunk("alone", good)])
        assert await local.export("alone") == together
        await local.close()

    run_async(main())


def test_the_same_seed_repeats_and_another_differs(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        samplings = [Sampling(1.0, 0.95, seed) for seed in (7, 7, 8, 2**63 - 1)]
        outputs = [await generate(local, "r", tokens(9), 20, sampling) for sampling in samplings]
        assert outputs[0] == outputs[1]
        assert len({tuple(output) for output in outputs}) == 3
        await local.close()

    run_debug(main())


def test_compute_environment_reaches_torch() -> None:
    program = "import torch; print(torch.get_num_threads(), torch.__config__.parallel_info())"
    environment = os.environ | compute_environment(1)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 ")
    assert "OMP_NUM_THREADS : 1" in done.stdout


def test_only_what_computes_imports_torch() -> None:
    modules = ("engine", "timed", "environment", "requests", "seal", "revision", "config", "vision_config")
    program = f"import sys, {', '.join(f'kernels.{module}' for module in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
