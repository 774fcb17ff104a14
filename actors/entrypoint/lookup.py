"""What of a prompt is cached: its keys over the shards that own them, their answers as one, and the plan that follows.

One question to each shard, and the first block that any of them lacks ends the prefix. Everything found is a hint: who
restores it checks what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES, Span, chain, root, tail_digests
from actors.rules.hit import Hit, exact_ends, promised, usable_blocks
from actors.rules.keys import keys as key_array
from actors.rules.keys import owners
from actors.rules.location import LOCATION_BYTES, words
from schemas.cache import BlocksFound, CachedPrefix, FindBlocks, Snapshot
from schemas.request import Submit

MAX_BLOCKS = 9216
"""The keys and locations of more, 1.18 M tokens, would not fit in a message: such a prompt is not cached."""


INLINE_TOKENS = 65536
"""Longer prompts are named in a thread: these take half a millisecond."""

MAX_TOUCHED = 4096
"""Keys in one event."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a prompt's blocks under `space`; the fields are those of `CachedPrefix`."""

    space: str
    root: bytes
    keys: bytes
    digests: bytes

    @property
    def num_blocks(self) -> int:
        """Complete blocks of the prompt."""
        return len(self.keys) // KEY_BYTES

    def key(self, number: int) -> bytes:
        """That of one block."""
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]


def can_be_named(text: bytes, num_tokens: int) -> bool:
    """Whether `text` is as long as was announced, and not too long to be cached."""
    return len(text) == 4 * num_tokens and num_tokens // BLOCK_TOKENS <= MAX_BLOCKS


def name(space: str, submit: Submit, text: bytes) -> Names:
    """Name the blocks of a prompt, and of output behind it: for whose cache it is in, with its images. 1 M tokens take
    several ms."""
    images = [Span(image.start, image.num_tokens, bytes.fromhex(image.digest)) for image in submit.images]
    first = root(space, submit.cache.encode())
    keys = chain(first, np.frombuffer(text, dtype="<u4"), images)
    return Names(space, first, b"".join(keys), tail_digests(images, len(text) // 4))


class Question(NamedTuple):
    """What one shard is asked: its keys, and which blocks of the prompt they are, ascending."""

    positions: npt.NDArray[np.int64]
    message: FindBlocks


def scatter(keys: bytes, shards: Sequence[str]) -> dict[str, Question]:
    """Each key to the shard that owns it; shards that own none are not asked. None at all when there are no shards."""
    if not keys or not shards:
        return {}
    wanted = key_array(keys)
    owner = owners(wanted, shards)
    questions: dict[str, Question] = {}
    for number, shard in enumerate(shards):
        positions = np.flatnonzero(owner == number)
        if len(positions):
            questions[shard] = Question(positions, FindBlocks(keys=wanted[positions].tobytes()))
    return questions


@dataclass(frozen=True, slots=True)
class Found:
    """The blocks there in a row from the first one, by location; and snapshots by the number of blocks before them."""

    locations: bytes = b""
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """How many those are."""
        return len(self.locations) // LOCATION_BYTES


def gather(keys: bytes, questions: Mapping[str, Question], answers: Mapping[str, BlocksFound], now_ns: int) -> Found:
    """What the shards said, as one: up to the first block that one of them lacks. One that is silent lacks all.

    `now_ns` is unix time: snapshots that have expired are left out, as are those that are not of the block asked for.
    """
    locations = np.zeros(len(keys) // KEY_BYTES, dtype="<u8")
    is_there = np.zeros(len(locations) + 1, dtype=bool)  # one more, which is not
    snapshots: dict[int, Snapshot] = {}
    for shard, (positions, _) in questions.items():
        answer = answers.get(shard, BlocksFound(locations=b""))
        num_found = min(len(answer.locations) // LOCATION_BYTES, len(positions))
        locations[positions[:num_found]] = words(answer.locations[: num_found * LOCATION_BYTES])
        is_there[positions[:num_found]] = True
        for number, snapshot in answer.snapshots:
            if 0 <= number < num_found and snapshot.expires_ns > now_ns:
                end = int(positions[number]) + 1
                if snapshot.key == keys[(end - 1) * KEY_BYTES : end * KEY_BYTES]:
                    snapshots[end] = snapshot
    num_blocks = int(is_there.argmin())
    reachable = {end: snapshot for end, snapshot in snapshots.items() if end <= num_blocks}
    return Found(locations[:num_blocks].tobytes(), reachable)


class Touched:
    """Blocks that were found lately, to be said in one event: of each prompt the last, which stands for all."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def add(self, names: Names, found: Found) -> bool:
        """True if something is to be said."""
        if not found.num_blocks or len(self._keys) >= MAX_TOUCHED:
            return False
        self._keys[names.key(found.num_blocks - 1)] = None
        return True

    def take(self) -> bytes:
        """The keys, one after the other, from which on it begins anew."""
        keys, self._keys = b"".join(self._keys), {}
        return keys


@dataclass(frozen=True, slots=True)
class Plan:
    """What prefill is told, and what is expected to become of it. `is_approximate`: a replay has part in it."""

    prefix: CachedPrefix
    hit: Hit
    is_approximate: bool


def plan(names: Names, found: Found, num_tokens: int) -> Plan:
    """By the hit rule. Prefill tries the snapshots in order, and replays a block without them."""
    num_usable = usable_blocks(found.num_blocks, num_tokens)
    prefix = CachedPrefix(
        space=names.space,
        root=names.root,
        keys=names.keys,
        locations=found.locations,
        num_blocks=num_usable,
        snapshots=[(end, found.snapshots[end]) for end in exact_ends(num_usable) if end in found.snapshots],
        digests=names.digests,
    )
    expected, is_approximate = promised(prefix, num_tokens)
    if not expected.num_blocks:
        prefix = structs.replace(prefix, num_blocks=0)  # nothing is to be loaded
    return Plan(prefix, expected, is_approximate)
