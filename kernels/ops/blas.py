"""One thread for numpy's matrix products, whatever the environment says and whoever imported numpy first.

The products here are small: a second thread makes them slower, and while it waits it spins on its neighbour's core.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

_SET = "scipy_openblas_set_num_threads64_"


def use_one_thread() -> bool:
    """Tell the OpenBLAS that numpy's wheels bring along, for this process; False where numpy uses another library."""
    package = Path(np.__file__).parent
    for path in (*package.parent.glob("numpy.libs/*openblas*"), *package.glob(".dylibs/*openblas*")):
        library = ctypes.CDLL(str(path))  # loaded already: the same one
        if hasattr(library, _SET):
            library[_SET](1)
            return True
    return False
