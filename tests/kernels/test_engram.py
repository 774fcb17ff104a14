import json

import pytest
import torch

from kernels.model import Model
from kernels.ops.engram import hash_tables, table_rows
from kernels.ops.quant import dequantize_rows
from tests.kernels.conftest import GOLDEN, golden


def history(ids: torch.Tensor, length: int = 4) -> torch.Tensor:
    shifted = [torch.cat((torch.full((shift,), -1), ids[: len(ids) - shift])) for shift in range(length)]
    return torch.stack(shifted, 1)


@pytest.mark.oracle
@pytest.mark.parametrize("masked", [False, True])
def test_full_size_rows_and_constants(masked: bool) -> None:
    data = golden("units/engram_full")
    tables = hash_tables((1, 14), 4, 8, 16_000_000, 99_092)
    assert [table.num_rows for table in tables] == [384_006_168, 384_016_682]
    ids = data["compressed_ids"]
    if masked:
        ids = torch.where(data["text_mask"].bool(), ids, -1)
    want = data["rows_masked" if masked else "rows"]
    for number, table in enumerate(tables):
        assert torch.equal(table.multipliers, data["multipliers"][number])
        assert torch.equal(table.primes, data["primes"][number].flatten())
        assert torch.equal(table.offsets, data["offsets"][number])
        assert torch.equal(table_rows(history(ids), int(data["pad_compressed_id"]), table), want[:, number])


@pytest.mark.oracle
@pytest.mark.parametrize("text", ["text0", "text1", "text2"])
def test_full_size_rows_of_real_texts(text: str) -> None:
    data = golden("units/engram_full_real_tokens")
    for number, table in enumerate(hash_tables((1, 14), 4, 8, 16_000_000, 99_092)):
        got = table_rows(history(data[f"{text}.compressed"]), 2, table)
        assert torch.equal(got, data[f"{text}.rows"][:, number])


@pytest.mark.oracle
@pytest.mark.parametrize(("number", "layer"), [(0, 1), (1, 4)])
def test_layer_of_the_small_model(mini_bf16: Model, number: int, layer: int) -> None:
    data = golden("mini/engram")
    token_map = json.loads((GOLDEN / "mini" / "engram_token_map.json").read_text())
    assert mini_bf16.token_map is not None and mini_bf16.token_map.pad == token_map["pad_compressed_id"]
    ids = torch.tensor(token_map["token_map"])[data["tokens"]]
    engram = mini_bf16.engrams[layer]
    rows = table_rows(history(ids), mini_bf16.token_map.pad, engram.tables)
    assert torch.equal(rows, data["rows"][:, number])
    looked_up = dequantize_rows(engram.codes[rows[:8]], engram.scale[rows[:8]]).flatten(1)
    assert torch.equal(looked_up.bfloat16(), data[f"layers.{layer}.embed_rows"])
    masked = torch.where(data["text_mask"].bool(), ids, -1)
    got = engram.forward(data["x_in"].float(), history(masked)[:16], mini_bf16.token_map.pad)
    want = data[f"layers.{layer}.out_masked"].float()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    dead = ~data["text_mask"][:16].bool()
    assert dead.any() and torch.equal(got[dead], data["x_in"][dead].float())
