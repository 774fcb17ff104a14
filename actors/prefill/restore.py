"""How much of a prompt is restored: what of its cached beginning could in fact be had, and the hit rule on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES
from actors.rules.hit import Hit, exact_ends, hit, promised
from actors.rules.location import LOCATION_BYTES, Location, words
from actors.rules.slab import Slab, SlotError, read_slot
from schemas.cache import BlocksFailed, CachedPrefix, HitShortened, Snapshot

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Block:
    """A block that was read, and is the one that was asked for."""

    payload: Buffer
    approximate: bool


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows behind `num_blocks` blocks."""

    num_blocks: int
    data: bytes
    approximate: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """From where a prompt is computed, and with what."""

    hit: Hit = field(default_factory=Hit)
    approximate: bool = False
    payloads: Sequence[Buffer] = ()
    windows: bytes | None = None

    def without_windows(self) -> Restored:
        """What is left when the engine takes it not: a replay, if it has not been one."""
        num_blocks = self.hit.num_blocks
        if self.windows is None or num_blocks < 2:
            return NOTHING
        return Restored(Hit(num_blocks, (num_blocks - 1) * BLOCK_TOKENS), approximate=True, payloads=self.payloads)

    def shortened(
        self, planned: Restored, request_id: str, epoch: int, reason: str, *, is_returned: bool = False
    ) -> HitShortened | None:
        """What the entrypoint is to be told, which believes in `planned`; None if it is right, and nothing returned."""
        if (self.hit, self.approximate) == (planned.hit, planned.approximate) and not is_returned:
            return None
        return HitShortened(
            request_id=request_id,
            epoch=epoch,
            num_blocks=self.hit.num_blocks,
            start=self.hit.start,
            approximate=self.approximate,
            reason=reason,
            is_returned=is_returned,
        )


NOTHING = Restored()


def check(prefix: CachedPrefix, num_tokens: int) -> None:
    """Raises ValueError if this cannot be what is cached of a prompt of `num_tokens`."""
    num_known = len(words(prefix.locations))
    if len(prefix.root) != KEY_BYTES or len(prefix.keys) != num_tokens // BLOCK_TOKENS * KEY_BYTES:
        raise ValueError(f"{len(prefix.keys)} bytes of keys came for {num_tokens} prompt tokens")
    if num_known * KEY_BYTES > len(prefix.keys) or not 0 <= prefix.num_blocks <= num_known:
        raise ValueError(f"{num_known} blocks are known, {prefix.num_blocks} to be restored of {num_tokens} tokens")


def keys(prefix: CachedPrefix, first: int, last: int) -> list[bytes]:
    """The keys of blocks `first` to before `last`."""
    return [prefix.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(first, last)]


def plan(prefix: CachedPrefix | None, num_tokens: int) -> Restored:
    """What is restored if all that was found is there: the entrypoint counts on it. Without payloads."""
    if prefix is None:
        return NOTHING
    return Restored(*promised(prefix, num_tokens))


class Fetched:
    """What has come so far of a prompt's cached blocks, each as it is, or why it is not; and the windows that came."""

    def __init__(self, prefix: CachedPrefix) -> None:
        self.prefix = prefix
        self.keys = keys(prefix, 0, prefix.num_blocks)
        self._packed = words(prefix.locations[: prefix.num_blocks * LOCATION_BYTES])
        self.locations = [Location.unpack(int(word)) for word in self._packed]
        self.blocks: list[Block | str | None] = [None] * prefix.num_blocks
        self.windows: Windows | None = None
        self.tried: set[int] = set()
        """Behind how many blocks windows were asked for."""

    @property
    def num_good(self) -> int:
        """Blocks that are there, before the first that is not."""
        for number, block in enumerate(self.blocks):
            if not isinstance(block, Block):
                return number
        return len(self.blocks)

    def bad(self) -> dict[str, list[int]]:
        """Reason -> the blocks that could not be read for it. Those that nobody tried to read are not bad."""
        bad: dict[str, list[int]] = {}
        for number, block in enumerate(self.blocks):
            if isinstance(block, str):
                bad.setdefault(block, []).append(number)
        return bad

    def failed(self) -> list[BlocksFailed]:
        """For those who own the slabs: what could not be read."""
        return [
            BlocksFailed(
                keys=b"".join(self.keys[number] for number in numbers),
                locations=b"".join(self._packed[number].tobytes() for number in numbers),
                reason=reason,
            )
            for reason, numbers in self.bad().items()
        ]

    def why(self) -> str:
        """Why it is less than was found, in words."""
        if self.num_good < len(self.blocks):
            return f"block {self.num_good} of {len(self.blocks)}: {self.blocks[self.num_good] or 'late'}"
        return "no windows" if self.windows is None else f"windows behind block {self.windows.num_blocks}"

    def wanted(self) -> list[tuple[int, Snapshot]]:
        """The snapshots still to be tried with the blocks that are there, or may still come; the best first."""
        last = next((i for i, block in enumerate(self.blocks) if isinstance(block, str)), len(self.blocks))
        ends = exact_ends(last)
        if self.windows is not None and self.windows.num_blocks in ends:
            return []
        return [known for known in self.prefix.snapshots if known[0] in ends and known[0] not in self.tried]

    def restored(self, num_tokens: int) -> Restored:
        """The hit rule on what came."""
        windows = self.windows
        found = hit(self.num_good, num_tokens, () if windows is None else (windows.num_blocks,))
        blocks = [block for block in self.blocks[: found.num_blocks] if isinstance(block, Block)]
        is_approximate = any(block.approximate for block in blocks)
        if windows is None or found.num_replayed or not blocks:
            windows = None
        else:
            is_approximate |= windows.approximate
        payloads = [block.payload for block in blocks]
        return Restored(
            found, is_approximate or found.num_replayed > 0, payloads, None if windows is None else windows.data
        )


def open_slots(
    header: Buffer, slots: Sequence[Buffer], wanted: Sequence[bytes], expected: Slab
) -> list[Block | str]:
    """What was read of one slab: its header, and the slots of the blocks `wanted`. These blocks, or what is wrong.

    `expected`: the layout and the size of payloads, without which no slab is understood.
    """
    try:
        slab = Slab.unpack(header)
    except SlotError as error:
        return [error.check] * len(slots)
    if (slab.layout, slab.payload_bytes) != (expected.layout, expected.payload_bytes):
        return ["layout"] * len(slots)
    found: list[Block | str] = []
    for data, key in zip(slots, wanted, strict=True):
        try:
            slot = read_slot(data, slab, key)
            found.append(Block(slot.payload, slot.header.approximate))
        except SlotError as error:
            found.append(error.check)
    return found
