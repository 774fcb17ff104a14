import ctypes
from pathlib import Path

import numpy as np
import pytest

from kernels.ops.blas import use_one_thread


def test_products_of_numpy_use_one_thread() -> None:
    if not use_one_thread():
        pytest.skip("numpy uses another library than its wheels for Linux bring along")
    (path,) = (Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*")
    library = ctypes.CDLL(str(path))
    assert library["scipy_openblas_get_num_threads64_"]() == 1
    library["scipy_openblas_set_num_threads64_"](2)
    try:
        assert library["scipy_openblas_get_num_threads64_"]() == 2
    finally:
        assert use_one_thread()
    assert library["scipy_openblas_get_num_threads64_"]() == 1
