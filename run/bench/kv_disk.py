"""Blocks to and from the disk by the real actors, beside plain sequential writes and reads of as many bytes.

One process, the memory bus, the real files. Both ways end on the disk: writing is over when the bytes are there
(fdatasync), and reading begins with none of them in the page cache (POSIX_FADV_DONTNEED). Rounds are interleaved, so
that other work on the machine hits both alike, and medians compared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.rules.chain import BLOCK_TOKENS
from actors.rules.slab import HEADER_BYTES, Slab
from run.bench.kv_store import Blocks, Store

SLAB_BYTES = 16 << 20
NUM_SLABS = 16
NUM_ROUNDS = 5

PIECE_BYTES = 4 << 20
"""Of a plain write or read."""

MAX_PARTS = 1024
"""Of one system call."""

Progress = Callable[[float], None]


async def measure_disk(folder: Path, block_bytes: int, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Ratios to the plain way, bytes on disk per token, latencies, and how fast a writer that starts finds its blocks.

    `folder` is empty, with room for `NUM_SLABS` slabs twice. Raises OSError.
    """
    per_slab = max(1, (SLAB_BYTES - HEADER_BYTES) // (HEADER_BYTES + block_bytes))
    blocks = Blocks.by_chance(NUM_SLABS * per_slab, block_bytes)
    raw, ours = folder / "raw", folder / "ours"
    rounds: list[dict[str, float]] = []
    found: dict[str, Any] = {"block_bytes": block_bytes, "num_blocks": len(blocks.keys)}
    for number in range(NUM_ROUNDS + 1):  # the first one warms up
        took_s = _plain(raw, blocks)
        async with Store.open(ours, SLAB_BYTES, blocks) as store:
            with _timed(took_s, "put"):
                await store.put()
                _sync(ours)
            await store.locate()
            with _timed(took_s, "get_cached"):
                await store.get()
            _drop(ours)
            with _timed(took_s, "get"):
                await store.get()
            if number == NUM_ROUNDS:
                found.update(await store.singles(before=lambda: _drop(ours)))
        found["disk_bytes_per_token"] = _bytes_per_token(ours)
        _drop(ours)
        with _timed(took_s, "restart"):
            async with Store.open(ours, SLAB_BYTES, blocks) as store:
                assert store.num_blocks >= len(blocks.keys), "a restart lost blocks"
        for file in ours.iterdir():
            file.unlink()
        rounds.append(took_s)
        progress((number + 1) / (NUM_ROUNDS + 1))
    median = {name: statistics.median(took_s[name] for took_s in rounds[1:]) for name in rounds[0]}
    speeds = {f"{name}_gb_s": round(blocks.num_bytes / median[name] / 1e9, 3) for name in median if name != "restart"}
    return {
        **{f"{name}_ratio": _ratio(rounds[1:], name) for name in ("put", "get", "get_cached")},
        "layout_bytes_per_token": block_bytes / BLOCK_TOKENS,
        "restart_blocks_per_s": round(len(blocks.keys) / median["restart"]),
        **speeds,
        **found,
    }


def _plain(path: Path, blocks: Blocks) -> dict[str, float]:
    """Write the same bytes to one file with its room reserved, as slabs have it, in large pieces. Then read them: to
    have them, as ours are had, and to let each piece go for the next one, which saves half of the work."""
    took_s: dict[str, float] = {}
    block_bytes = len(blocks.payloads[0])
    per_piece = min(max(1, PIECE_BYTES // block_bytes), MAX_PARTS)
    starts = range(0, blocks.num_bytes, PIECE_BYTES)
    with _timed(took_s, "raw_put"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(descriptor, 0, blocks.num_bytes)
        for number in range(0, len(blocks.payloads), per_piece):
            piece = blocks.payloads[number : number + per_piece]
            assert os.pwritev(descriptor, piece, number * block_bytes) == len(piece) * block_bytes
        os.fdatasync(descriptor)
    with _timed(took_s, "raw_get_cached"):
        pieces = [os.pread(descriptor, PIECE_BYTES, start) for start in starts]
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with _timed(took_s, "raw_get"):
        pieces = [os.pread(descriptor, PIECE_BYTES, start) for start in starts]
    assert sum(map(len, pieces)) == blocks.num_bytes
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with _timed(took_s, "raw_get_let_go"):
        for start in starts:
            os.pread(descriptor, PIECE_BYTES, start)
    os.close(descriptor)
    path.unlink()
    return took_s


def _ratio(rounds: list[dict[str, float]], name: str) -> float:
    """The median of the rounds': what slows down a whole round is in neither."""
    return round(statistics.median(took_s[f"raw_{name}"] / took_s[name] for took_s in rounds), 3)


@contextmanager
def _timed(took_s: dict[str, float], name: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    took_s[name] = time.perf_counter() - start_s


def _sync(folder: Path) -> None:
    for descriptor in _opened(folder):
        os.fdatasync(descriptor)


def _drop(folder: Path) -> None:
    """Take all files out of the page cache."""
    for descriptor in _opened(folder):
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_per_token(folder: Path) -> float:
    """What all slabs take on the disk, by what they have slots for."""
    size_bytes = num_slots = 0
    for descriptor in _opened(folder):
        size_bytes += os.fstat(descriptor).st_blocks * 512
        num_slots += Slab.unpack(os.pread(descriptor, HEADER_BYTES, 0)).num_slots
    return round(size_bytes / num_slots / BLOCK_TOKENS, 2)


def _opened(folder: Path) -> Iterator[int]:
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
