import pytest
import torch

from kernels.ops.attention import Keys, KeySet, attend, sparse_attend
from kernels.ops.rope import Rotation, frequencies, rotate_
from kernels.ops.rounding import Rounding, keep, to_bf16
from tests.kernels.conftest import golden


def gathered() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    data = golden("units/sparse_attn")
    index = data["idx"].long()
    bias = torch.zeros(index.shape).masked_fill(index < 0, -torch.inf)
    return data, data["kv"].float()[index.clamp(min=0)], bias


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "rounding", "atol"), [("o_fp32", keep, 1e-5), ("o", to_bf16, 2**-6)])
@pytest.mark.parametrize("cut", [140, 64, 1])
def test_sparse_attention(name: str, rounding: Rounding, atol: float, cut: int) -> None:
    data, keys, bias = gathered()
    sets = [KeySet(keys[:, :cut], bias[:, :cut]), KeySet(keys[:, cut:], bias[:, cut:])]
    got = attend(data["q"].float(), sets[: 2 if cut < 140 else 1], data["sink"], 64**-0.5, rounding)
    torch.testing.assert_close(got, data[name].float(), rtol=0, atol=atol)


def test_a_query_without_keys_gives_zeros() -> None:
    data, keys, bias = gathered()
    got = attend(data["q"].float(), [KeySet(keys, torch.full_like(bias, -torch.inf))], data["sink"], 0.125, keep)
    assert torch.equal(got, torch.zeros_like(got))


def test_an_empty_key_set_changes_no_bit() -> None:
    data, keys, bias = gathered()
    full = [KeySet(keys, bias), KeySet(keys[:, :64], torch.full_like(bias[:, :64], -torch.inf))]
    q, sink = data["q"].float(), data["sink"]
    assert torch.equal(attend(q, full, sink, 0.125, keep), attend(q, full[:1], sink, 0.125, keep))


@pytest.mark.parametrize(("heads", "num_keys"), [(6, 17), (4, 128), (3, 40)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_one_row_has_the_bits_of_many(heads: int, num_keys: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(30, heads, 64, generator=generator)
    keys, bias = torch.randn(30, num_keys, 64, generator=generator), torch.zeros(30, num_keys)
    sink = torch.zeros(heads)
    want = attend(q, [KeySet(keys, bias)], sink, 0.125, keep)
    torch.set_num_threads(num_threads)
    assert torch.equal(attend(q, [KeySet(keys, bias)], sink, 0.125, keep), want)
    for row in range(30):
        only = slice(row, row + 1)
        assert torch.equal(attend(q[only], [KeySet(keys[only], bias[only])], sink, 0.125, keep), want[only])


@pytest.mark.oracle
@pytest.mark.parametrize("cut", [140, 64, 1])
def test_named_rows_are_gathered_and_the_output_is_rotated_back(cut: int) -> None:
    data, keys, bias = gathered()
    q, cache, named = data["q"].float(), data["kv"].float(), data["idx"].long()
    still = Rotation(torch.ones(len(q), 1, 32), torch.zeros(len(q), 1, 32))
    got = sparse_attend(
        q, Keys(cache, named[:, :cut]), Keys(cache, named[:, cut:]), data["sink"], 64**-0.5, still, keep
    )
    torch.testing.assert_close(got, data["o_fp32"], rtol=0, atol=1e-5)
    turn = Rotation.at(torch.arange(len(q)), frequencies(32, 10000.0, None))
    got = sparse_attend(q, Keys(cache, named), Keys(cache, named[:, :0]), data["sink"], 64**-0.5, turn, keep)
    torch.testing.assert_close(rotate_(got, turn), data["o_fp32"], rtol=0, atol=1e-5)
