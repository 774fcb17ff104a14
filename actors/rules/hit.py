"""How much of a prompt need not be computed (design §5): blocks there in a row, and a snapshot of their windows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from actors.rules.chain import BLOCK_TOKENS
from actors.rules.location import LOCATION_BYTES, approximate, words
from schemas.cache import CachedPrefix


@dataclass(frozen=True, slots=True)
class Hit:
    """`num_blocks` blocks are restored. Computation begins at token `start`: behind them when their windows come with
    them, else one block earlier, which is replayed: its windows are made anew, its cached rows stay as they are."""

    num_blocks: int = 0
    start: int = 0

    @property
    def num_replayed(self) -> int:
        """Tokens whose rows are cached and that are computed all the same."""
        return self.num_blocks * BLOCK_TOKENS - self.start


EXACT_OUTPUT = 1024
"""Tokens of an output, at most, that are computed by all layers when its request is computed anew."""


def bounded_tokens(num_tokens: int, num_output: int) -> int:
    """Of a text that ends with `num_output` tokens of output: those that count as its prompt, of which decoder layers
    compute the last window only, and cached blocks end before that.

    A little output is computed as it was the first time, behind its prompt and by all layers: the state is the same,
    bit for bit. More of it is taken for prompt: its blocks are restored, too, and the state is approximate.
    """
    return num_tokens - num_output if num_output <= EXACT_OUTPUT else num_tokens


def usable_blocks(num_present: int, num_tokens: int) -> int:
    """Of `num_present` blocks in a row from the first one, those a prompt of `num_tokens` can use.

    At least a window of tokens is computed: decoder replay needs the encoder's output of the last ones.
    """
    return max(0, min(num_present, num_tokens // BLOCK_TOKENS - 1))


def hit(num_present: int, num_tokens: int, snapshots: Collection[int] = ()) -> Hit:
    """What to restore. `snapshots`: the numbers of blocks behind which the windows can be had.

    The last of `usable_blocks` counts. Without windows there, those one block earlier leave the same work, exactly;
    without these, too, one block is computed again; with no more than that there is nothing to gain, and nothing is
    restored.
    """
    num_usable = usable_blocks(num_present, num_tokens)
    for num_blocks in exact_ends(num_usable):
        if num_blocks in snapshots:
            return Hit(num_blocks, num_blocks * BLOCK_TOKENS)
    return Hit(num_usable, (num_usable - 1) * BLOCK_TOKENS) if num_usable > 1 else Hit()


def exact_ends(num_usable: int) -> list[int]:
    """The numbers of blocks whose windows are wanted, the best first: what is replayed otherwise, or less."""
    return [num_blocks for num_blocks in (num_usable, num_usable - 1) if num_blocks > 0]


def promised(prefix: CachedPrefix, num_tokens: int) -> tuple[Hit, bool]:
    """What is restored of a prompt if all that was found is there, and whether something approximate has part in it:
    a block, the windows, or a replay. The entrypoint counts on it until prefill says otherwise."""
    snapshots = dict(reversed(prefix.snapshots))
    found = hit(prefix.num_blocks, num_tokens, snapshots)
    is_approximate = bool(approximate(words(prefix.locations[: found.num_blocks * LOCATION_BYTES])).any())
    if found.num_blocks and not found.num_replayed:
        is_approximate |= snapshots[found.num_blocks].approximate
    return found, is_approximate or found.num_replayed > 0
