"""The engine that computes, over a folder on disk: the state after a hit is bit for bit that of a cold run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from bus.files import PosixFiles
from kernels.local import LocalEngine
from tests.actors.prefixes import Stand
from tests.untrained import untrained


def test_a_hit_is_bit_for_bit_a_cold_run(tmp_path: Path) -> None:
    prompt = np.random.default_rng(2).integers(3, 1000, 470).astype("<u4")

    class OnDisk(Stand):
        def open_files(self, name: str) -> PosixFiles:  # type: ignore[override]
            return PosixFiles(tmp_path)

    async def main() -> None:
        system = OnDisk(0)
        try:
            engine: Any = LocalEngine(untrained(), num_slots=2, max_step_tokens=512)
            await system.setup(engine)
            space = system.engine.info.space
            whole = await system.finish("cold", prompt, None)
            first = prompt[:300]
            await system.finish("first", first, system.cached(first, space=space))
            prefix = system.cached(prompt, space=space)
            assert (prefix.num_blocks, [end for end, _ in prefix.snapshots]) == (2, [2, 1])
            assert await system.finish("hit", prompt, prefix) == whole
            assert system.detail("restored_tokens") == 256 and system.detail("replayed_tokens") == 0
            assert not system.entry.shortened
            system.prefill.keeper.snapshots.clear()
            assert await system.finish("replay", prompt, prefix) != b""
            assert system.detail("replayed_tokens") == 128
            (told,) = system.entry.shortened["replay"]
            assert (told.num_blocks, told.start, told.approximate) == (2, 128, True)
        finally:
            await system.stop()

    asyncio.run(main())
