"""The pure part of restoring: what is planned, what becomes of it, and what is kept."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from actors.prefill.batch import Batch
from actors.prefill.job import Job, Loading
from actors.prefill.keeping import Keeping
from actors.prefill.restore import NOTHING, Block, Fetched, Restored, Windows, check, open_slots, plan
from actors.rules.chain import chain, root
from actors.rules.hit import Hit, hit
from actors.rules.location import Location
from actors.rules.meter import Meter
from actors.rules.slab import Slab
from kernels.engine import Tokens
from kernels.timed import TimedEngine
from schemas.bulk import Handle
from schemas.cache import CachedPrefix, Snapshot
from tests.actors.builders import dispatch, pack_slot
from tests.actors.core import VOCABULARY, info

HANDLE = Handle(address="mem://x", key="k", generation=1, size_bytes=10, checksum=0)
PAYLOAD = b"x" * 64


def snapshot(*, approximate: bool = False) -> Snapshot:
    return Snapshot(key=b"k" * 16, holder="prefill/p0", handle=HANDLE, expires_ns=1, approximate=approximate)


def prefix_of(
    tokens: Tokens, num_known: int, num_blocks: int, ends: list[int], flags: int = 0, windows_flags: int = 0
) -> CachedPrefix:
    first = root("timed")
    words = [Location(1, slot, bool(flags >> slot & 1)).pack() for slot in range(num_known)]
    return CachedPrefix(
        space="timed",
        root=first,
        keys=b"".join(chain(first, tokens)),
        locations=np.array(words, dtype="<u8").tobytes(),
        num_blocks=num_blocks,
        snapshots=[(end, snapshot(approximate=bool(windows_flags >> end & 1))) for end in ends],
    )


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[CachedPrefix, Tokens]:
    tokens = np.arange(draw(st.integers(0, 1500)), dtype="<u4")
    num_known = draw(st.integers(0, len(tokens) // 128))
    num_usable = max(0, min(num_known, len(tokens) // 128 - 1))
    ends = [end for end in (num_usable, num_usable - 1) if end > 0 and draw(st.booleans())]
    prefix = prefix_of(tokens, num_known, num_usable, ends, draw(st.integers(0, 15)), draw(st.integers(0, 4095)))
    return prefix, tokens


FATES = st.lists(st.sampled_from(["exact", "approximate", "bad", "late"]), min_size=12, max_size=12)


@given(prefixes(), FATES, st.lists(st.booleans(), min_size=2, max_size=2))
def test_what_is_restored_is_there_in_a_row_and_never_more_than_was_planned(
    known: tuple[CachedPrefix, Tokens], fates: list[str], can_be_pulled: list[bool]
) -> None:
    prefix, tokens = known
    check(prefix, len(tokens))
    planned = plan(prefix, len(tokens))
    fetched = Fetched(prefix)
    for number, fate in enumerate(fates[: prefix.num_blocks]):
        if fate in ("exact", "approximate"):
            fetched.blocks[number] = Block(PAYLOAD, fate == "approximate")
        elif fate == "bad":
            fetched.blocks[number] = "checksum"
    while wanted := fetched.wanted():
        end, found = wanted[0]
        fetched.tried.add(end)
        if can_be_pulled[end % 2]:
            fetched.windows = Windows(end, b"w", found.approximate)
    restored = fetched.restored(len(tokens))

    good = [fate in ("exact", "approximate") for fate in fates]
    assert all(good[: restored.hit.num_blocks])
    assert len(restored.payloads) == restored.hit.num_blocks <= prefix.num_blocks
    assert restored.hit.start <= planned.hit.start
    assert len(tokens) - restored.hit.start >= 128 or restored.hit.start == 0
    assert 128 * restored.hit.num_blocks <= max(0, len(tokens) - 128)
    assert restored.hit.num_replayed in (0, 128)
    assert (restored.windows is None) == (restored.hit.num_replayed > 0 or restored.hit.num_blocks == 0)
    if restored.windows is not None:
        assert fetched.windows is not None and fetched.windows.num_blocks == restored.hit.num_blocks
    inherits = "approximate" in fates[: restored.hit.num_blocks]
    if restored.windows is not None and fetched.windows is not None:
        inherits |= fetched.windows.approximate
    assert restored.approximate == (inherits or restored.hit.num_replayed > 0)
    first_bad = (good[: prefix.num_blocks] + [False]).index(False)
    assert restored.hit.num_blocks >= first_bad - 1 or first_bad <= 1
    assert sorted(sum(fetched.bad().values(), [])) == [n for n in range(prefix.num_blocks) if fates[n] == "bad"]


@given(prefixes())
def test_when_all_is_there_it_becomes_what_was_planned(known: tuple[CachedPrefix, Tokens]) -> None:
    prefix, tokens = known
    fetched = Fetched(prefix)
    fetched.blocks = [Block(PAYLOAD, location.approximate) for location in fetched.locations]
    if prefix.snapshots:
        end, found = prefix.snapshots[0]
        fetched.windows = Windows(end, b"w", found.approximate)
    assert fetched.wanted() == []
    restored = fetched.restored(len(tokens))
    assert restored.shortened(plan(prefix, len(tokens)), "r1", 1, "why") is None


@given(prefixes(), st.booleans(), st.sets(st.integers(0, 11)), st.integers(1, 300))
def test_each_block_that_is_missing_is_stored_once(
    known: tuple[CachedPrefix, Tokens], is_approximate: bool, bad: set[int], chunk: int
) -> None:
    prefix, tokens = known
    fetched = Fetched(prefix)
    fetched.blocks = ["key" if n in bad else Block(PAYLOAD, is_approximate) for n in range(prefix.num_blocks)]
    restored = fetched.restored(len(tokens))
    keeping = Keeping(prefix, tokens)
    keeping.settle(restored, fetched)
    stored: list[int] = []
    for num_done in [*range(restored.hit.start, len(tokens), chunk), len(tokens)]:
        numbers = keeping.blocks(num_done)
        assert all(128 * (number + 1) <= num_done for number in numbers)
        stored += numbers
    flags = [Location.unpack(int(word)).approximate for word in np.frombuffer(prefix.locations, dtype="<u8")]
    bad = {number for number in bad if number < prefix.num_blocks}
    expected = [
        number
        for number in range(restored.hit.num_blocks, len(tokens) // 128)
        if number >= len(flags) or number in bad or (flags[number] and not restored.approximate)
    ]
    assert stored == expected
    ends = keeping.windows(len(tokens))
    assert all(end == 128 * number and restored.hit.start < end <= len(tokens) for number, end in ends)


def test_windows_are_kept_where_the_next_prompt_looks_for_them() -> None:
    tokens = np.arange(700, dtype="<u4")
    cold = Keeping(prefix_of(tokens, 0, 0, []), tokens)
    assert cold.windows(512) == [] and cold.windows(700) == [(5, 640), (4, 512)]
    assert cold.windows(700) == []
    warm = Keeping(prefix_of(tokens, 4, 4, [4]), tokens)
    warm.settle(Restored(Hit(4, 512)))
    assert warm.windows(700) == [(5, 640)]  # those it went on from are another's
    warm.settle(NOTHING)
    assert warm.windows(700) == [(5, 640), (4, 512)]
    assert Keeping(prefix_of(tokens[:130], 0, 0, []), tokens[:130]).windows(130) == [(1, 128)]
    assert Keeping(prefix_of(tokens[:127], 0, 0, []), tokens[:127]).windows(127) == []


def cut_at(branches: list[int], start: int = 0, num_tokens: int = 2000) -> list[int]:
    """Where the chunks of a prompt end that is computed from `start`, in as few as may be."""
    tokens = np.arange(num_tokens, dtype="<u4")
    keeping = Keeping(prefix_of(tokens, start // 128, start // 128, []), tokens, branches=branches)
    keeping.settle(Restored(Hit(start // 128, start)))
    ends = [start]
    while ends[-1] < num_tokens:
        ends.append(ends[-1] + keeping.cut(ends[-1], num_tokens - ends[-1]))
    return ends[1:-1]


@pytest.mark.parametrize(
    ("branches", "start", "num_tokens", "cuts"),
    [
        ([], 0, 2000, []),
        ([2], 0, 2000, []),  # no system prompt
        ([127], 0, 2000, []),
        ([128], 0, 2000, [128]),
        ([400], 0, 2000, [384]),
        ([400], 0, 511, []),  # the end is as good
        ([400], 0, 512, [384]),  # but a block later a short question would not find the windows it looks for
        ([400], 128, 2000, [384]),
        ([400], 256, 2000, []),  # these windows are there
        ([400], 384, 2000, []),
        ([400], 1024, 2000, []),
        ([128], 0, 383, []),
        ([2, 1000], 0, 2000, [896]),
        ([400, 1000], 0, 2000, [384, 896]),
        ([400, 1000], 384, 2000, [896]),  # the same system prompt, other examples
        ([400, 1000], 512, 2000, []),  # the next turn of what is known
        ([400, 500], 0, 2000, [384]),  # of one block
        ([400, 600], 0, 2000, [384]),  # windows behind the third serve those who branch off in the fifth block
        ([400, 700], 0, 2000, [384, 640]),
        ([400, 1990], 0, 2000, [384]),
        ([-5, 1 << 40], 0, 2000, []),
    ],
)
def test_a_chunk_ends_where_others_branch_off_unless_they_find_windows_anyway(
    branches: list[int], start: int, num_tokens: int, cuts: list[int]
) -> None:
    assert cut_at(branches, start, num_tokens) == cuts


@given(prefixes(), st.lists(st.integers(0, 1600), max_size=2).map(sorted), st.integers(1, 700))
def test_whoever_branches_off_finds_windows(
    known: tuple[CachedPrefix, Tokens], branches: list[int], max_tokens: int
) -> None:
    """However a cold prompt is computed: whole, in order, no more steps than one for each branch; and then another with
    its first tokens, however long it is, replays nothing."""
    _, tokens = known
    if not len(tokens):
        return
    prefix = prefix_of(tokens, 0, 0, [])
    job = Job(dispatch("a", len(tokens)), tokens)
    job.keeping = keeping = Keeping(prefix, tokens, branches=branches)
    batch, steps, kept = Batch(Meter()), list[list[int]](), set[int]()
    batch.add(job)
    batch.admit(TimedEngine(info(max_tokens=4096), VOCABULARY), 0)
    while step := batch.next_step(max_tokens):
        ((_, chunk),) = step
        steps.append(chunk.tokens.tolist())
        job.num_done += len(chunk.tokens)
        found = keeping.windows(job.num_done)
        assert all(job.num_done // 128 - 1 <= number <= job.num_done // 128 for number, _ in found)
        assert not kept & {number for number, _ in found}
        kept |= {number for number, _ in found}
    assert sum(steps, []) == tokens.tolist()
    plain = max(1, max_tokens // 128) * 128
    assert len(steps) <= -(-len(tokens) // plain) + len(branches)
    for branch in branches:
        num_shared = min(branch, len(tokens)) // 128
        for num_tokens in range(num_shared * 128 + 1, num_shared * 128 + 400, 77):
            assert hit(num_shared, num_tokens, kept).num_replayed == 0


def test_slots_are_checked_against_the_layout_and_the_size_that_the_engine_has() -> None:
    layout = hashlib.sha256(b"timed").digest()[:16]
    slab, expected = Slab(64, 8, layout, 3), Slab(64, 1 << 24, layout, 0)
    whole = pack_slot(slab, b"k" * 16, b"p" * 16, PAYLOAD, approximate=True)
    (block, why) = open_slots(slab.pack(), [whole, whole], [b"k" * 16, b"j" * 16], expected)
    assert isinstance(block, Block) and bytes(block.payload) == PAYLOAD and block.approximate
    assert why == "key"
    assert open_slots(slab.pack()[:-1], [whole], [b"k" * 16], expected) == ["short"]
    assert open_slots(Slab(63, 8, layout, 3).pack(), [whole], [b"k" * 16], expected) == ["layout"]
    other = Slab(64, 8, layout[::-1], 3)
    whole = pack_slot(other, b"k" * 16, b"p" * 16, PAYLOAD, approximate=True)
    assert open_slots(other.pack(), [whole], [b"k" * 16], expected) == ["layout"]


def job(id: str, num_tokens: int, *, num_load_bytes: int = 0) -> Job:
    loading = Loading.WAITING if num_load_bytes else Loading.NONE
    tokens = np.arange(num_tokens, dtype=np.uint32)
    return Job(dispatch(id, num_tokens), tokens, loading=loading, num_load_bytes=num_load_bytes)


class TestLoading:
    def test_in_order_within_the_bytes_and_one_alone_may_be_larger(self) -> None:
        batch = Batch(Meter())
        for id, size in (("a", 500), ("b", 60), ("c", 50), ("d", 10)):
            batch.add(job(id, 300, num_load_bytes=size))
        assert [each.id for each in batch.to_load(100)] == ["a"]
        assert batch.to_load(100) == [] and batch.num_load_bytes == 500
        first = batch.get("a")
        assert first is not None
        first.loading = Loading.DONE
        assert batch.to_load(100) == []  # it waits for the engine
        first.resumed(256)
        assert [each.id for each in batch.to_load(100)] == ["b"]  # the last would fit, and does not overtake
        second = batch.get("b")
        assert second is not None
        batch.remove(second)
        assert [each.id for each in batch.to_load(100)] == ["c", "d"]

    def test_who_loads_delays_nobody_and_keeps_its_place(self) -> None:
        engine, batch = TimedEngine(info(num_slots=1), VOCABULARY), Batch(Meter())
        slow = job("slow", 300, num_load_bytes=10)
        for each in (slow, job("a", 300), job("b", 300)):
            batch.add(each)
        batch.to_load(100)
        admitted, hopeless = batch.admit(engine, 0)
        assert [each.id for each in admitted] == ["a"] and not hopeless
        slow.loading = Loading.DONE
        batch.loaded(slow)
        engine.free("a")
        batch.remove(admitted[0])
        assert [each.id for each in batch.admit(engine, 0)[0]] == ["slow"]

    def test_what_will_be_restored_is_no_load(self) -> None:
        tokens = np.arange(600, dtype="<u4")
        message = structs.replace(dispatch("r1", 600), prefix=prefix_of(tokens, 3, 3, [3]))
        made = Job.of(message, tokens.tobytes(), [], space="timed", block_bytes=64)
        batch = Batch(Meter())
        batch.add(made)
        assert batch.num_tokens_left == 600 - 384 and made.num_load_bytes == 3 * 64 + 10
        made.settle(NOTHING, "late")
        assert batch.num_tokens_left == 600 and made.num_load_bytes == 0

    def test_what_the_engine_has_is_not_held_here_too(self) -> None:
        tokens = np.arange(600, dtype="<u4")
        message = structs.replace(dispatch("r1", 600), prefix=prefix_of(tokens, 3, 3, [3]))
        made = Job.of(message, tokens.tobytes(), [], space="timed", block_bytes=64)
        made.settle(Restored(Hit(3, 384), payloads=[PAYLOAD] * 3, windows=b"w"), "")
        made.resumed(384)
        assert made.restored == Restored(Hit(3, 384)) and made.loading is Loading.NONE


def test_windows_behind_blocks_that_are_not_there_are_not_asked_for() -> None:
    fetched = Fetched(prefix_of(np.arange(900, dtype="<u4"), 6, 6, [6, 5]))
    assert [end for end, _ in fetched.wanted()] == [6, 5]
    fetched.blocks[5] = "key"
    assert [end for end, _ in fetched.wanted()] == [5]
    fetched.blocks[2] = "key"
    assert fetched.wanted() == []


@pytest.mark.parametrize("fields", [{"space": "other"}, {"exact": True}])
def test_what_is_of_no_use_is_not_loaded(fields: dict[str, object]) -> None:
    tokens = np.arange(600, dtype="<u4")
    prefix = structs.replace(prefix_of(tokens, 3, 3, [3]), space=fields.get("space", "timed"))
    message = structs.replace(dispatch("r1", 600), prefix=prefix, exact="exact" in fields)
    made = Job.of(message, tokens.tobytes(), [], space="timed", block_bytes=64)
    assert made.loading is Loading.NONE and (made.keeping is None) == ("space" in fields)
