"""All that a writer has, asked for and fetched."""

from __future__ import annotations

import logging
from typing import NamedTuple

from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.subjects import DUMP
from schemas.cache import DumpBlocks

log = logging.getLogger("shoal.bus")

DUMP_S = 30.0
"""How long a writer of many blocks may take to gather them, and to give each of its arrays."""


class Dump(NamedTuple):
    """The blocks of one writer after its event `seq`: 16, 16 and 8 bytes of each; `slabs` are the numbers of its files.

    There are parents only where they were asked for.
    """

    incarnation: str
    seq: int
    slabs: list[int]
    keys: bytes
    parents: bytes
    locations: bytes


async def fetch_dump(bus: Bus, bulk: Bulk, writer: str, request: DumpBlocks) -> Dump | None:
    """What the writer has; parents unless the request is one of a shard. None, said in the log, if it cannot be had."""
    try:
        dumped = await bus.ask(DUMP.at(writer), request, timeout_s=DUMP_S)
        keys = await bulk.unwrap(dumped.keys, timeout_s=DUMP_S)
        parents = b"" if request.shard else await bulk.unwrap(dumped.parents, timeout_s=DUMP_S)
        locations = await bulk.unwrap(dumped.locations, timeout_s=DUMP_S)
    except BusError as error:
        log.info("no dump of writer %s: %s", writer, error)
        return None
    num_blocks = len(keys) // 16
    is_whole = (len(keys), len(locations)) == (num_blocks * 16, num_blocks * 8) and len(parents) in (0, len(keys))
    if not is_whole or any(not 0 <= slab < 1 << 63 for slab in dumped.slabs):
        log.warning("the dump of writer %s makes no sense, with %d bytes of keys", writer, len(keys))
        return None
    return Dump(dumped.incarnation, dumped.seq, dumped.slabs, keys, parents, locations)
