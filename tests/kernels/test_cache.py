from collections.abc import Iterator, Sequence

import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Admission, Sampling
from kernels.model import Model
from kernels.pages import PoolFull


def run(model: Model, pool: StatePool, slot: int, tokens: Sequence[int]) -> torch.Tensor:
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


def test_nothing_moves_too(mini: Model) -> None:
    pool = StatePool(mini.config, 2, 32, drafts=True)
    first, second = pool.alloc(), pool.alloc()
    pool.import_(second, pool.export(first))
    assert pool.length(second) == 0
    assert torch.equal(run(mini, pool, second, range(9)), run(mini, pool, first, range(9)))


def test_a_used_slot_imports_nothing(mini: Model) -> None:
    pool = StatePool(mini.config, 2, 256)
    slot, other = pool.alloc(), pool.alloc()
    run(mini, pool, slot, range(130))
    before = pool.kv.payloads(slot, 0, 1)
    run(mini, pool, other, range(50, 150))
    state = pool.export(other)
    with pytest.raises(ValueError, match="holds 130 tokens"):
        pool.import_(slot, state)
    with pytest.raises(ValueError, match="holds 130 tokens"):
        pool.import_prefix(slot, state)
    assert torch.equal(pool.kv.payloads(slot, 0, 1), before)


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
    assert shapes["tokens"] == (33,) and shapes["swa"] == (10, 15, 66)
    assert shapes["main.2"] == (16, 36) and shapes["index_k.6"] == (33, 34)
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


def altered_in_one_value(state: dict[str, torch.Tensor], name: str) -> Iterator[dict[str, torch.Tensor]]:
    """States that differ from `state` in one value of one row of `name`, each in another row, the newest first."""
    for row in reversed(range(state[name].flatten(0, -2).shape[0])):
        altered = state | {name: state[name].clone()}
        values = altered[name].flatten(0, -2)[row]
        if name.startswith("pair"):
            values[0] += 1.0
        elif name.startswith("index_k"):
            values[-1] += 10  # a scale: the sign of the score stays, its size does not
        elif name.startswith("main"):
            values[int((values[:32] & 7 != 0).to(torch.int8).argmax())] ^= 8
        else:
            values[int((values[:64] & 127 != 0).to(torch.int8).argmax())] ^= 128
        yield altered


@pytest.mark.parametrize(
    "array", ["swa", "main.2", "main.4", "main.6", "index_k.2", "index_k.6", "pair.2", "draft_swa"]
)
def test_every_cache_is_read(mini: Model, array: str) -> None:
    """Altering one cached value alters the next logits, or the drafts."""
    assert mini.drafter is not None
    pool = StatePool(mini.config, 1, 256, drafts=True)
    slot = pool.alloc()
    run(mini, pool, slot, range(1, 68))
    state = pool.export(slot)
    drafter = mini.drafter

    def outcome() -> torch.Tensor:
        if array == "draft_swa":
            return drafter.draft([(slot, 5)], [Sampling(0.0, 1.0, 0)], pool).logits
        return run(mini, pool, slot, range(5, 6))

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        pool.free(slot)
        assert pool.alloc() == slot
        pool.import_(slot, tensors)

    want = outcome()
    for altered in altered_in_one_value(state, array):
        restore(altered)
        if not torch.equal(outcome(), want):
            break
    else:
        pytest.fail(f"no value of {array} is read")
    restore(state)
    assert torch.equal(outcome(), want)


def test_room_is_reserved_in_blocks_and_says_ok_later_or_never(mini: Model) -> None:
    pool = StatePool(mini.config, 3, 512, num_blocks=4)
    assert [pool.admit(num) for num in (1, 512, 513)] == [Admission.OK, Admission.OK, Admission.NEVER]
    first, second = pool.alloc(129), pool.alloc(100)
    assert pool.kv.num_free == 1 and pool.room(first) == 129
    assert [pool.admit(num) for num in (128, 129, 513)] == [Admission.OK, Admission.LATER, Admission.NEVER]
    with pytest.raises(PoolFull, match="no room for 129 tokens"):
        pool.alloc(129)
    assert pool.kv.num_free == 1 and pool.num_free == 1
    third = pool.alloc(1)
    assert pool.admit(1) is Admission.LATER
    pool.free(second)
    assert pool.kv.num_free == 1 and pool.alloc(128) == second
    with pytest.raises(ValueError, match="130 tokens exceed the 129"):
        run(mini, pool, first, range(130))
    for slot in (first, second, third):
        pool.free(slot)
    assert pool.kv.num_free == 4 and pool.num_free == 3
    small = StatePool(mini.config, 3, 512, num_blocks=2)
    assert [small.admit(num) for num in (256, 257)] == [Admission.OK, Admission.NEVER]


def test_a_slot_grows_by_blocks_while_there_are_some(mini: Model) -> None:
    pool = StatePool(mini.config, 2, 512, num_blocks=4)
    first, second = pool.alloc(130), pool.alloc(10)
    tokens = [number % 251 for number in range(300)]
    run(mini, pool, first, tokens[:130])
    pool.grow(first, 200)
    pool.grow(first, 50)
    assert pool.kv.num_free == 1 and pool.room(first) == 200
    pool.grow(first, 300)
    with pytest.raises(PoolFull):
        pool.grow(second, 129)
    with pytest.raises(ValueError, match="only 512"):
        pool.grow(second, 513)
    assert pool.kv.num_free == 0 and pool.room(second) == 10
    got = run(mini, pool, first, tokens[130:])
    pool.free(second)
    pool.free(first)
    assert pool.kv.num_free == 4
    slot = pool.alloc(300)
    run(mini, pool, slot, tokens[:130])
    assert torch.equal(run(mini, pool, slot, tokens[130:]), got)


def test_scattered_blocks_hold_what_consecutive_ones_hold(mini: Model) -> None:
    tokens = [(7 * number) % 251 for number in range(400)]
    pool = StatePool(mini.config, 4, 512)
    slot = pool.alloc()
    want = [run(mini, pool, slot, part) for part in (tokens[:300], tokens[300:])]
    state = pool.export(slot)
    slots = [pool.alloc(128 * number) for number in (1, 3, 2)]
    for used in (slots[1], slot, slots[2], slots[0]):
        pool.free(used)
    slot, other = pool.alloc(400), pool.alloc(512)
    ids = pool.kv.tables[slot, :4].tolist()
    assert sorted(ids) != list(range(min(ids), min(ids) + 4))
    run(mini, pool, other, tokens[::-1])
    assert torch.equal(run(mini, pool, slot, tokens[:300]), want[0])
    assert torch.equal(run(mini, pool, slot, tokens[300:]), want[1])
    for name, array in pool.export(slot).items():
        assert torch.equal(array, state[name]), name


def test_payloads_are_what_export_gives_and_import_takes(mini: Model) -> None:
    tokens = [(5 * number) % 250 for number in range(300)]
    pool = StatePool(mini.config, 2, 512, num_blocks=6)
    slot = pool.alloc(300)
    run(mini, pool, slot, tokens[:256])
    state, payloads = pool.export(slot), pool.kv.payloads(slot, 0, 2)
    assert torch.equal(pool.kv.payloads(slot, 1, 1), payloads[1:])
    pool.free(slot)
    parts = pool.kv.layout.split(payloads)
    assert all(torch.equal(part, state[name]) for name, part in parts.items())
    other = pool.alloc(512)
    run(mini, pool, other, tokens[::-1])
    pool.free(other)
    slot = pool.alloc(300)
    pool.import_prefix(slot, {"tokens": state["tokens"], **parts})
    assert pool.length(slot) == 256 - mini.config.sliding_window
    run(mini, pool, slot, tokens[pool.length(slot) : 257])
    again = pool.export(slot)
    assert all(torch.equal(again[name][: len(part)], part) for name, part in parts.items())
