"""A prompt whose beginning is cached: only the rest is computed, and the state is the same, whatever goes wrong."""

from __future__ import annotations

from run.virtual import run_virtual
from tests.actors.prefixes import BLOCK_BYTES, blocks, cold, stand, tokens


def test_the_next_turn_computes_its_new_tokens_only_and_its_state_is_that_of_a_cold_run() -> None:
    async def main() -> None:
        first, second = tokens(blocks(4) + 50), tokens(blocks(6) + 7)
        expected = await cold([first, second])
        async with stand() as system:
            assert await system.finish("r1", first, system.cached(first)) == expected[0]
            assert len(system.shelf.locations) == 4 and system.detail("stored_blocks") == 4
            assert sorted(system.directory.snapshots) == sorted(list(system.shelf.locations)[2:])
            computed = system.detail("computed_tokens")
            prefix = system.cached(second)
            assert (prefix.num_blocks, [end for end, _ in prefix.snapshots]) == (4, [4, 3])
            assert await system.finish("r2", second, prefix) == expected[1]
            assert system.detail("computed_tokens") - computed == len(second) - blocks(4)
            assert system.detail("restored_tokens") == blocks(4)
            assert system.detail("replayed_tokens") == 0
            assert system.detail("read_bytes") == 4 * (BLOCK_BYTES + 64)
            assert 0 < system.detail("snapshot_bytes") < 200
            assert system.detail("stored_blocks") == 6
            assert not system.entry.shortened and not system.shelf.failed

    run_virtual(main())
