"""Which weights these are: checkpoints of one shape must not share what was computed with one of them."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

from kernels.shards import read_shards

_END_BYTES = 64


def revision(folder: str | Path) -> str:
    """16 hexadecimal digits for a checkpoint folder: of config.json, and of the name, type, shape and first and last
    64 bytes of every tensor.

    Headers and 128 bytes of each tensor are read, whatever its size. What that misses is a change that leaves both ends
    of every tensor as they were: training moves all values, an edit of single rows need not. Tokenizer and card are no
    part of it, nor how tensors are spread over files.

    Raises OSError when a file cannot be read, CheckpointError when there are no files, only an index.
    """
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    shards = read_shards(folder)
    shards.need_files()
    with ExitStack() as stack:
        paths = {entry.path for entry in shards.entries.values()}
        files = {path: stack.enter_context(path.open("rb")).fileno() for path in paths}
        for name, entry in sorted(shards.entries.items()):
            digest.update(repr((name, entry.dtype, entry.shape)).encode())
            num = min(_END_BYTES, entry.num_bytes)
            for offset in (entry.offset, entry.offset + entry.num_bytes - num):
                digest.update(os.pread(files[entry.path], num, offset))
    return digest.hexdigest()[:16]
