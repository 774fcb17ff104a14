import pytest
import torch

from kernels.ops import sample as reference
from kernels.ops.gpu.sample import sample

ROWS, VOCAB = 12, 1100


def arguments(temperature: float, top_p: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, VOCAB, generator=generator).mul_(8).round_().div_(2)  # many equal ones
    row = torch.arange(ROWS)
    return logits, torch.full((ROWS,), temperature), torch.full((ROWS,), top_p), row * 77 - 3, row * row


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 0.7, 3.0])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
def test_tokens_are_those_of_the_reference(temperature: float, top_p: float) -> None:
    args = arguments(temperature, top_p)
    assert torch.equal(sample(*args), reference.sample(*args))


def test_masked_rows_and_nan() -> None:
    logits, *others = arguments(1.0, 0.9)
    logits[:] = -torch.inf
    logits[torch.arange(ROWS), torch.arange(ROWS) * 90] = 1.0
    assert sample(logits, *others).tolist() == [90 * row for row in range(ROWS)]
    logits[3, 1050] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        sample(logits, *others)
