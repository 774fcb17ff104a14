"""An untrained shoal-tiny, whose answers are long and varied: no test depends on what the bundled one says."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from run.checkpoint import DEFAULT_SEED, make


@functools.cache
def untrained() -> Path:
    """A folder with what `shoal checkpoint make` writes: made at the first call, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-untrained-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make(folder, DEFAULT_SEED)
    return folder
