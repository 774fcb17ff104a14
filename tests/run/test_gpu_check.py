import subprocess
import sys
from pathlib import Path

import pytest
import torch

from run.bench import gpu_check, gpu_model
from run.bench.gpu_case import Case, Draw
from run.bench.gpu_cases import CASES
from run.bench.gpu_model import NUM_STEPS, Agreement, check_model
from run.settings import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    done = subprocess.run([sys.executable, "-m", "run.bench.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no CUDA GPU" in done.stdout


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is the CPU, with references for kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(Case, "kernel", Case.reference)
    monkeypatch.setattr(gpu_check, "CASES", [case for case in CASES if case.name in ("fp8_qdq", "norm")])
    monkeypatch.setattr(gpu_check, "timed", lambda call: 2.0)
    monkeypatch.setattr(gpu_check, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(gpu_check, "check_model", lambda folder, device: Agreement(NUM_STEPS, 1.0, True, 3.0, 2.0))


def test_the_table(pretended: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main() == 0
    out = capsys.readouterr().out
    assert "2 of 2 passed" in out
    moved = 64 * 5120 * 4 * 2
    row = next(line for line in out.splitlines() if line.startswith("fp8_qdq")).split()
    assert row[1:5] == ["0.0e+00", "0.0e+00", "same", "2.0"]
    assert row[5:] == [f"{moved / 1e6:.2f}", f"{moved / 2e-6 / 1e9:.0f}", "131.1%"]


def test_a_wrong_or_broken_kernel_fails(
    pretended: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Case, "kernel", lambda case, args: case.reference(args) * 1.001)
    assert gpu_check.main() == 1
    assert "0 of 2 passed" in capsys.readouterr().out

    def broken(case: Case, args: object) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(Case, "kernel", broken)
    assert gpu_check.main() == 1
    assert "out of shared memory" in capsys.readouterr().out


def test_a_model_agrees_with_itself_and_not_with_another(
    pretended: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_model, "NUM_STEPS", 4)
    found = check_model(DEFAULT_MODEL, "cpu")
    assert (found.num_same, found.cosine > 0.99999, found.same_alone, found.passed) == (4, True, True, True)
    assert not Agreement(4, 0.99, True, 1.0, 1.0).passed
    assert not Agreement(4, 1.0, False, 1.0, 1.0).passed
    monkeypatch.setattr(gpu_check, "check_model", lambda folder, device: Agreement(2, 1.0, True, 1.0, 1.0))
    assert gpu_check.main() == 1
    assert "2 of 4 greedy tokens as on the CPU" in capsys.readouterr().out


def test_names_and_draws() -> None:
    """Names tell cases apart, and a draw depends on its seed only."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert torch.equal(Draw(gpu_check.REAL).normal(2, 3), Draw(gpu_check.REAL).normal(2, 3))
