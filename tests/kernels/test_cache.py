import pytest
import torch

from kernels.batch import Batch
from kernels.cache import PoolFull, StatePool
from kernels.model import Model


def run(model: Model, pool: StatePool, slot: int, tokens: range) -> torch.Tensor:
    return model.logits(model.forward(Batch.all_rows([(slot, pool.length(slot), tokens)]), pool))


def test_slots_are_taken_and_given_back(mini: Model) -> None:
    pool = StatePool(mini.config, 2, 32)
    first, second = pool.alloc(), pool.alloc()
    assert first != second and pool.num_free == 0
    with pytest.raises(PoolFull):
        pool.alloc()
    pool.free(first)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(first)
    assert pool.alloc() == first and pool.length(first) == 0


def test_a_used_slot_behaves_like_a_new_one(mini: Model, pool: StatePool) -> None:
    slot = pool.alloc()
    fresh = run(mini, pool, slot, range(10, 60))
    pool.free(slot)
    other = pool.alloc()
    assert other == slot
    run(mini, pool, other, range(100, 230))
    pool.free(other)
    again = pool.alloc()
    assert torch.equal(run(mini, pool, again, range(10, 60)), fresh)


def test_truncate_reaches_back_max_rollback_and_no_further(mini: Model, pool: StatePool) -> None:
    slot = pool.alloc()
    run(mini, pool, slot, range(40))
    with pytest.raises(ValueError, match="can go back to 32"):
        pool.truncate(slot, 31)
    with pytest.raises(ValueError, match="not to 41"):
        pool.truncate(slot, 41)
    pool.truncate(slot, 32)
    pool.truncate(slot, 32)
    run(mini, pool, slot, range(2))
    with pytest.raises(ValueError, match="can go back to 32"):
        pool.truncate(slot, 31)  # going forward again does not restore what an earlier overwrite lost


def test_import_refuses_what_does_not_fit_and_leaves_the_slot_alone(mini: Model, pool: StatePool) -> None:
    slot = pool.alloc()
    run(mini, pool, slot, range(33))
    state = pool.export(slot)
    small = StatePool(mini.config, 1, 32)
    target = small.alloc()
    with pytest.raises(ValueError, match="does not fit"):
        small.import_(target, state)
    target = pool.alloc()
    for name in state:
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            pool.import_(target, {key: value for key, value in state.items() if key != name})
        if name != "length":
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                pool.import_(target, state | {name: state[name][..., :0]})
    assert pool.length(target) == 0
    with pytest.raises(ValueError, match="can go back to 33"):
        pool.import_(target, state)
        pool.truncate(target, 32)


def test_export_holds_valid_rows_only(mini: Model, pool: StatePool) -> None:
    slot = pool.alloc()
    run(mini, pool, slot, range(33))
    shapes = {name: tuple(value.shape) for name, value in pool.export(slot).items()}
    assert shapes["tokens"] == (33,) and shapes["swa"] == (10, 15, 64)
    assert shapes["main.2"] == (16, 64) and shapes["index_k.6"] == (33, 64)
    assert shapes["pair.2"] == (1, 2, 64) and "pair.6" not in shapes


def test_refused_batches_change_nothing(mini: Model, pool: StatePool) -> None:
    slot = pool.alloc()
    run(mini, pool, slot, range(20))
    before = pool.export(slot)
    for start, tokens in ((19, [1]), (21, [1]), (20, [256]), (20, [-1]), (20, [1] * 237)):
        with pytest.raises(ValueError):
            mini.forward(Batch.last_rows([(slot, start, tokens)]), pool)
    with pytest.raises(ValueError, match="empty"):
        Batch.last_rows([(slot, 20, [])])
    with pytest.raises(ValueError, match="one segment"):
        Batch.last_rows([(slot, 20, [1]), (slot, 21, [1])])
    with pytest.raises(ValueError, match="at least one"):
        Batch.last_rows([])
    after = pool.export(slot)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("array", ["swa", "main.2", "main.6", "index_k.2", "index_k.6", "pair.4"])
def test_every_cache_is_read(mini: Model, pool: StatePool, array: str) -> None:
    """Altering one cached row alters the next logits."""
    slot = pool.alloc()
    run(mini, pool, slot, range(1, 68))
    state = pool.export(slot)
    want = run(mini, pool, slot, range(5, 6))
    altered = state | {array: state[array].clone()}
    rows = altered[array][0] if array == "swa" else altered[array]
    if array.startswith("index_k"):
        rows.copy_(rows.flip(0))  # picks change when keys trade places
    else:
        rows.add_(1.0)
    pool.free(slot)
    slot = pool.alloc()
    pool.import_(slot, altered)
    assert not torch.equal(run(mini, pool, slot, range(5, 6)), want)
    pool.truncate(slot, 67)
    pool.import_(slot, state)
    assert torch.equal(run(mini, pool, slot, range(5, 6)), want)
