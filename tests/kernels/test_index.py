import pytest
import torch

from kernels.ops import index
from kernels.ops.pack import Record, gather, pack
from kernels.ops.rounding import keep
from tests.kernels.conftest import golden


@pytest.mark.oracle
@pytest.mark.parametrize(("block", "count"), [(4, 5), (8, 3)])
def test_candidate_blocks(block: int, count: int) -> None:
    data = golden("units/candidates")
    values = index.hide(data["scores"].clone(), data["visible"])
    mask = index.candidate_mask(values, data["visible"], block, count)
    assert torch.equal(mask, data[f"mask_block{block}_top{count}"].bool())


def test_picks_ascend_ties_go_to_the_lower_row_and_invisible_ones_are_dropped() -> None:
    values = torch.tensor([[1.0, 3.0, 0.0, -0.0, 3.0, 0.0, -2.0, 9.0]])
    visible = torch.tensor([7])
    index.hide(values, visible)
    assert index.top_rows(values, visible, 2).tolist() == [[1, 4]]
    assert index.top_rows(values, visible, 4).tolist() == [[0, 1, 2, 4]]
    assert index.top_rows(values, visible, 5).tolist() == [[0, 1, 2, 3, 4]]
    assert index.top_rows(values, visible, 10).tolist() == [[0, 1, 2, 3, 4, 5, 6, -1, -1, -1]]


def test_wider_scores_pick_the_same() -> None:
    values = torch.randint(0, 4, (20, 100), generator=torch.Generator().manual_seed(0)).float()
    visible = torch.arange(20) * 5
    wide = torch.cat((values, torch.zeros(20, 156)), 1)
    narrow = index.top_rows(index.hide(values, visible), visible, 16)
    assert torch.equal(index.top_rows(index.hide(wide, visible), visible, 16), narrow)


def test_all_rows_is_what_top_rows_gives_below_the_limit() -> None:
    visible = torch.tensor([0, 1, 5, 16])
    values = index.hide(torch.randn(4, 128), visible)
    assert torch.equal(index.all_rows(visible, 16), index.top_rows(values, visible, 16))


@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_scores_of_a_row_do_not_depend_on_the_others(heads: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, weights = torch.randn(20, heads, 64, generator=generator), torch.randn(20, heads, generator=generator)
    keys = torch.randn(20, index.KEY_TILE, 64, generator=generator)
    want = index.scores(q, weights, keys, keep)
    plain = torch.einsum("th,thj->tj", weights, torch.einsum("thd,tjd->thj", q, keys).relu())
    torch.testing.assert_close(want, plain, rtol=1e-4, atol=1e-4)
    torch.set_num_threads(num_threads)
    for row in range(20):
        only = slice(row, row + 1)
        assert torch.equal(index.scores(q[only], weights[only], keys[only], keep), want[only])


@pytest.mark.parametrize("per_block", [64, 128])
@pytest.mark.parametrize("requests", [1, 2, 6])
def test_cached_keys_are_scored_where_they_are_visible(per_block: int, requests: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    rows, blocks = 6, 384 // per_block
    keys = torch.randn(20 * per_block, 32, generator=generator)
    pages = pack(keys, Record.INDEX).view(20, per_block, -1)
    tables = torch.randint(0, 20, (requests, blocks), generator=generator)
    q, weights = torch.randn(rows, 3, 32, generator=generator), torch.randn(rows, 3, generator=generator)
    visible = torch.tensor([0, 1, 128, 129, 200, 380]) if requests == 1 else torch.tensor([380, 0, 1, 128, 384, 5])
    mask = torch.rand(rows, 384, generator=generator) < 0.5
    cache = index.Cache(pages, tables)
    values = gather(pages.flatten(0, 1), torch.arange(20 * per_block), Record.INDEX).view(20, per_block, 32)
    own = values[tables.repeat_interleave(rows // requests, 0)].flatten(1, 2)
    want = torch.einsum("th,thj->tj", weights, torch.einsum("thd,tjd->thj", q, own).relu())
    for candidates in (None, mask):
        got = index.cached_scores(q, weights, cache, visible, candidates, keep)
        seen = torch.arange(384) < visible.unsqueeze(1)
        seen = seen if candidates is None else seen & candidates
        assert bool((got[~seen] == -torch.inf).all())
        torch.testing.assert_close(got[seen], want[seen])
