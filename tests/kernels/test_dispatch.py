import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import dispatch, quant

ROOT = Path(__file__).parents[2]


class OnCuda:
    """All that dispatch looks at."""

    is_cuda = True


def test_a_cuda_tensor_goes_to_the_kernel_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fake(name: str) -> Any:
        asked.append(name)
        return type("Module", (), {"fp8_qdq": staticmethod(lambda x: ("kernel", x))})

    monkeypatch.setattr(dispatch, "import_module", fake)
    x = OnCuda()
    assert quant.fp8_qdq(x) == ("kernel", x)  # type: ignore[comparison-overlap, arg-type]
    assert asked == ["kernels.ops.gpu.quant"]
    assert isinstance(quant.fp8_qdq(torch.ones(32)), torch.Tensor)
    assert len(asked) == 1


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kernels.ops.gpu.quant", raising=False)
    monkeypatch.delitem(sys.modules, "kernels.ops.gpu.numbers", raising=False)
    with pytest.raises(RuntimeError, match="triton"):
        quant.fp8_qdq(OnCuda())  # type: ignore[arg-type]


def test_the_cpu_path_never_imports_triton() -> None:
    code = (
        "import sys, torch\n"
        "from kernels import local, model\n"
        "from kernels.ops import quant\n"
        "quant.fp8_qdq(torch.ones(32))\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
