import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024  # of one block on sm_90


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_at_real_widths(tmp_path: Path) -> None:
    """A case launches every kernel, each passes the compiler down to machine code, and its memory fits.

    The code is the same for 1, 2 and 16 rows: where a compiler may look at a batch, a row's bits may depend on it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_all"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = json.loads(done.stdout)
    shared = printed["shared"]
    sources = (ROOT / "kernels" / "ops" / "gpu").glob("*.py")
    kernels = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    assert set(shared) == kernels
    assert printed["varying"] == []
    assert max(shared.values()) <= SHARED_BYTES
