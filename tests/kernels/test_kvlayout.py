import json

import pytest
import torch

from kernels.config import ModelConfig
from kernels.kvlayout import KVLayout
from tests.kernels.conftest import GOLDEN


def real() -> KVLayout:
    return KVLayout(ModelConfig.from_keys(json.loads((GOLDEN.parent / "real_config.json").read_text())))


def test_the_published_sizes() -> None:
    layout = real()
    assert (layout.main_bytes, layout.index_bytes, layout.window_bytes) == (288, 68, 528)
    assert layout.token_bytes == 890
    assert layout.block_bytes == 113_920
    assert layout.swa_bytes == 2_703_360
    assert layout.draft_swa_bytes == 202_752
    assert layout.pair_bytes == 24_576


@pytest.mark.parametrize(("context", "megabytes"), [(32 << 10, 10), (128 << 10, 27), (1_000_000, 174)])
def test_the_published_index_scan(context: int, megabytes: int) -> None:
    num_bytes = real().index_scan_bytes(context)
    assert num_bytes == (3 * context // 2 + context + 4 * min(16384, context)) * 68
    assert round(num_bytes / 1e6) == megabytes


def test_payloads_are_owner_by_owner_main_before_index() -> None:
    layout = KVLayout(ModelConfig.from_folder(GOLDEN / "mini"))
    payloads = torch.randint(0, 256, (3, layout.block_bytes), dtype=torch.uint8)
    parts = layout.split(payloads)
    assert list(parts) == ["main.2", "index_k.2", "main.4", "index_k.4", "main.6", "index_k.6"]
    assert torch.equal(layout.join(parts), payloads)
    assert torch.equal(parts["main.2"][64], payloads[1, : layout.main_bytes])  # the second block's first row
    assert torch.equal(parts["index_k.6"][-1], payloads[2, -layout.index_bytes :])
    with pytest.raises(ValueError, match="payloads are"):
        layout.split(payloads[:, 1:])
