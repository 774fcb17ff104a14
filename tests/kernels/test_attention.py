import pytest
import torch

from kernels.ops.attention import PICK_TILE, Keys, KeySet, Window, attend, picked, sliding, sparse_attend
from kernels.ops.pack import Record, gather, pack
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


@pytest.mark.parametrize("length", [1, 3, 40])
def test_picked_rows_are_those_of_the_blocks(length: int) -> None:
    """Few picks are unpacked one by one, many from whole blocks."""
    generator = torch.Generator().manual_seed(length)
    pages = pack(torch.randn(9 * 64, 32, generator=generator), Record.MAIN).view(9, 64, -1)
    tables = torch.tensor([[3, 1, 7, 2], [8, 0, 5, 4]])
    picks = torch.randint(-1, 256, (2 * length, 70), generator=generator)
    sets = picked(pages, tables, picks)
    assert not isinstance(sets, Keys | KeySet) and [len(one.keys[0]) for one in sets] == [PICK_TILE, 6]
    keys, bias = torch.cat([one.keys for one in sets], 1), torch.cat([one.bias for one in sets], 1)
    values = gather(pages.flatten(0, 1), torch.arange(9 * 64), Record.MAIN).view(9, 64, 32)
    for row in range(2 * length):
        for place in range(0, 70, 23):
            pick = int(picks[row, place])
            assert float(bias[row, place]) == (0.0 if pick >= 0 else -torch.inf)
            if pick >= 0:
                assert torch.equal(keys[row, place], values[tables[row // length, pick // 64], pick % 64])
    assert picked(pages, tables, picks[:, :0]) == ()


def test_windows_slide_over_a_run() -> None:
    run = torch.arange(2.0 * 6).view(2, 6, 1).expand(-1, -1, 2).contiguous()  # two segments: 3 rows before, 3 new ones
    window = Window(2, 4, torch.tensor([0, 1, 2, 3, 0, 0]))
    keys = sliding(run, window)
    assert isinstance(keys, KeySet)
    rows = keys.keys.reshape(6, 4, 2)[:, :, 0]  # a row is a view of the run
    assert keys.keys.data_ptr() == run.data_ptr()
    assert rows.tolist() == [[*range(start, start + 4)] for start in (0, 1, 2, 6, 7, 8)]
    assert (keys.bias == -torch.inf).sum(1).tolist() == [0, 1, 2, 3, 0, 0]
    named = torch.where(keys.bias == 0, rows.long(), -1)
    assert torch.equal(window.named, named)


@pytest.mark.parametrize(("num", "length"), [(2, 6), (50, 5), (2, 130)])
def test_rows_that_share_their_keys_have_the_bits_of_copies(num: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    run = torch.randn(num, 31 + length, 64, generator=generator)
    q, sink = torch.randn(num * length, 4, 64, generator=generator), torch.zeros(4)
    source = sliding(run, Window(num, 32, torch.zeros(num * length, dtype=torch.int64)))
    assert isinstance(source, KeySet)
    copied = KeySet(source.keys.reshape(num * length, 32, 64).contiguous(), source.bias)
    assert torch.equal(attend(q, [source], sink, 0.125, keep), attend(q, [copied], sink, 0.125, keep))
