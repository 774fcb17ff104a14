"""The KV cache: blocks looked up, stored, dropped and handed on; windows kept for a while.

Arrays of keys, parents and locations travel as bytes, 16, 16 and 8 a piece: a chain of 8,192 blocks is 128 KiB of keys.
A key is a block's (actors/rules/chain.py), a location, u64 little-endian, says which slot of which slab it is in and
whether it is approximate (actors/rules/slab.py).
"""

from __future__ import annotations

from schemas.bulk import Handle, Payload
from schemas.message import Message


class Snapshot(Message, frozen=True):
    """The window rows at the end of the block `key`, kept by the actor `holder` (`role/id`) for whoever pulls.

    A hint: it may be gone. `expires_ns` is unix time. `approximate`: it comes from a replay.
    """

    key: bytes
    holder: str
    handle: Handle
    expires_ns: int
    approximate: bool = False


class DescribeSpace(Message, frozen=True):
    """Entrypoint → prefill replica: what are the blocks that you read and write?"""


class SpaceDescribed(Message, frozen=True):
    """`space` names the weights and the layout of its blocks (`EngineInfo.space`): equal ones can be exchanged."""

    space: str


class FindBlocks(Message, frozen=True):
    """Entrypoint → metadata shard: which of these blocks, all of them yours and in the order of their chain, exist?"""

    keys: bytes


class BlocksFound(Message, frozen=True):
    """The locations of those before the first one that is not there.

    `snapshots`: (number of the key in the question, its snapshot) where there is one of a block found, the last few.
    """

    locations: bytes
    snapshots: list[tuple[int, Snapshot]] = []


class SnapshotsKept(Message, frozen=True):
    """Prefill or decode → the metadata shards that own the keys: these can be pulled."""

    snapshots: list[Snapshot]


class StoreBlocks(Message, frozen=True):
    """Prefill or decode → the writer that owns the keys: write these. Answered when every slot is whole.

    `payloads` are all of one size, one after the other. `space` names the model and the layout of the payloads.
    """

    space: str
    keys: bytes
    parents: bytes
    payloads: Payload
    approximate: bool = False


class BlocksWritten(Message, frozen=True):
    """They are there, and will be found. `num_new`: as many were not there before."""

    num_new: int


class BlocksStored(Message, frozen=True):
    """Event of a writer: these blocks are in its slabs now. `seq` grows by one with each of its events."""

    writer: str
    incarnation: str
    seq: int
    keys: bytes
    parents: bytes
    locations: bytes


class BlocksDropped(Message, frozen=True):
    """Event of a writer: these are not, at these locations, any more. Counted by the same `seq`."""

    writer: str
    incarnation: str
    seq: int
    keys: bytes
    locations: bytes


class BlocksTouched(Message, frozen=True):
    """Event of an entrypoint: these blocks are being used, and with them all that they build on."""

    keys: bytes


class BlocksFailed(Message, frozen=True):
    """Event of a prefill replica: these could not be read, for `reason`. Whose slabs they are in drops them."""

    keys: bytes
    locations: bytes
    reason: str


class DumpBlocks(Message, frozen=True):
    """Metadata shard or kvstore → writer: tell all you have. Of `shards`, if there are any, only what `shard` owns."""

    shard: str = ""
    shards: list[str] = []


class BlocksDumped(Message, frozen=True):
    """All blocks of the writer as they are after its event `seq`; `slabs` are the numbers of its files."""

    writer: str
    incarnation: str
    seq: int
    slabs: list[int]
    keys: Payload
    parents: Payload
    locations: Payload


class DropBlocks(Message, frozen=True):
    """Kvstore → writer: free these slots, where they still hold these blocks."""

    keys: bytes
    locations: bytes


class MakeRoom(Message, frozen=True):
    """Writer → kvstore: I am running out of slots, and need `num_slots` more, or another file of `slab_bytes`.

    0 bytes: slots only, for there is no place on the disk for a file.
    """

    writer: str
    num_slots: int
    slab_bytes: int


class RoomMade(Message, frozen=True):
    """`may_add`: make that file. Otherwise the budget is used up, and blocks are being dropped instead."""

    may_add: bool


class AdoptSlab(Message, frozen=True):
    """Kvstore → writer: the file `name` belongs to a writer that is gone: it is yours."""

    name: str


class CachedPrefix(Message, frozen=True):
    """What of a prompt may be restored rather than computed, for prefill; and under which keys to store the rest.

    `keys` are those of all complete blocks of the prompt, `root` the parent of the first. `locations` of the first
    blocks, as many as there are; `num_blocks` of them to be restored (design §5, hit rule). `snapshots`: (number of
    blocks before it, snapshot), to be tried in order. `digests`: of the images that overlap the incomplete last block,
    one after the other. `images_from`: images that end at or before this token were not encoded, as it is all cached.
    """

    space: str
    root: bytes
    keys: bytes = b""
    locations: bytes = b""
    num_blocks: int = 0
    snapshots: list[tuple[int, Snapshot]] = []
    digests: bytes = b""
    images_from: int = 0


class ChainEnd(Message, frozen=True):
    """Where the chain of a prompt ends, so that decode can go on with it.

    `key` is that of the last complete block (or the root), `tokens` those behind it as u32 little-endian, `digests` as
    in `CachedPrefix`. `approximate`: the state comes from a replay, and so will all further blocks.
    """

    space: str
    key: bytes
    tokens: bytes = b""
    digests: bytes = b""
    approximate: bool = False


class HitShortened(Message, frozen=True):
    """Prefill → entrypoint: less of the prompt than was found is restored, or differently.

    `num_blocks` blocks are; computation begins at token `start`. `approximate`: a replay has part in it. `is_returned`:
    an image is needed that was not given, the replica has let go of the request, and it is to be dispatched anew.
    """

    request_id: str
    epoch: int
    num_blocks: int
    start: int
    approximate: bool
    reason: str
    is_returned: bool = False
