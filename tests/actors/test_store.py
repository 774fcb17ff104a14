"""What kvstore decides: who may add a file, who inherits one, which copy of a block goes."""

from __future__ import annotations

import numpy as np

from actors.kvstore.budget import ALLOWED_S, Budget
from actors.kvstore.orphans import ABSENT_S, Orphans
from actors.kvstore.store import EXTRA, Store
from actors.rules import keys as block_keys
from actors.rules.location import Location, file_name
from actors.rules.writers import Writers
from tests.actors.shelf import ROOT, chain

FILES = {file_name(1, "w0"): 400, file_name(2, "w1"): 400, "notes.txt": 10**9}


def test_a_budget_counts_slabs_that_are_there_and_those_just_allowed() -> None:
    budget = Budget(1700)
    assert budget.may_add("w0", 400, FILES, 0.0) and budget.num_bytes(0.0) == 1200
    assert budget.may_add("w0", 400, FILES, 1.0), "the same one, asked for again"
    assert budget.may_add("w1", 400, FILES, 1.0)
    assert budget.num_bytes(1.0) == 1600
    assert not budget.may_add("w0", 900, FILES, 2.0)
    files = {**FILES, file_name(3, "w0"): 400}
    assert not budget.may_add("w0", 400, files, 2.0), "one is there, one is being made"
    assert budget.num_bytes(2.0) == 1600 and budget.num_bytes(ALLOWED_S + 2.0) == 1200
    assert not budget.may_add("w0", 400, files, ALLOWED_S)
    assert budget.may_add("w0", 400, files, ALLOWED_S + 1.0), "the other one never came"


def test_a_file_with_a_number_that_no_slab_has_takes_room_all_the_same() -> None:
    budget = Budget(1700)
    budget.see({**FILES, "ffffffffff.w0.slab": 1000})
    assert budget.num_bytes(0.0) == 1800 and budget.is_exceeded()


def test_a_file_for_which_there_is_no_place_is_given_up() -> None:
    budget = Budget(1700)
    assert budget.may_add("w0", 400, FILES, 0.0)
    assert not budget.may_add("w1", 900, FILES, 0.0)
    assert not budget.may_add("w0", 0, FILES, 0.0)
    assert budget.may_add("w1", 900, FILES, 0.0)


def test_a_writer_without_any_slab_may_always_have_one() -> None:
    budget = Budget(800)
    assert not budget.may_add("w0", 400, FILES, 0.0)
    assert budget.may_add("w2", 400, FILES, 0.0)
    assert not budget.may_add("w2", 400, {**FILES, file_name(3, "w2"): 400}, 0.0)


def test_slabs_of_who_is_away_for_long_go_to_who_has_fewest() -> None:
    orphans = Orphans()
    names = [file_name(slab, writer) for slab, writer in enumerate(["old", "old", "old", "w0", "w0", "w1"])]
    names += ["old", "x.old.slab"]
    assert orphans.heirs(names, ["w0", "w1", "w2"], 5.0) == []
    assert orphans.heirs(names, ["w0", "w1", "w2"], 4.0 + ABSENT_S) == []
    given = [(names[0], "w2"), (names[1], "w1"), (names[2], "w2")]
    assert orphans.heirs(names, ["w0", "w1", "w2"], 5.0 + ABSENT_S) == given
    assert orphans.heirs(names, [], 5.0 + ABSENT_S) == []
    assert orphans.heirs(names, ["old", "w0", "w1"], 6.0 + ABSENT_S) == []
    assert orphans.heirs(names, ["w0", "w1"], 7.0 + ABSENT_S) == [], "it was back"


class Told:
    """A store, told of blocks by their places: (slab, slot), and a third for approximate ones."""

    def __init__(self) -> None:
        self.writers = Writers()
        self.store = Store(self.writers)
        self.keys: dict[int, bytes] = {}

    def stored(self, writer: str, keys: list[bytes], *places: tuple[int, ...], now_s: float = 1.0) -> None:
        words = [Location(place[0], place[1], len(place) > 2).pack() for place in places]
        parents = [ROOT, *keys[:-1]]
        arrays = (block_keys.keys(b"".join(data)) for data in (keys, parents))
        self.store.stored(writer, *arrays, np.array(words, dtype=np.uint64), now_s)

    def drops(self) -> dict[str, list[tuple[bytes, Location]]]:
        """What each writer is to be told; forgotten then."""
        drops, self.store.drops = self.store.drops, {}
        return {
            writer: [
                (key.tobytes(), Location.unpack(word))
                for keys, locations in parts
                for key, word in zip(keys, locations.tolist(), strict=True)
            ]
            for writer, parts in drops.items()
            if sum(len(locations) for _, locations in parts)
        }


def test_of_two_copies_the_older_goes_unless_the_newer_is_approximate() -> None:
    told, (key, other) = Told(), chain("a", 2)
    told.stored("w0", [key], (1, 1))
    told.stored("w0", [key], (1, 1))
    assert told.drops() == {}
    told.stored("w1", [key], (2, 1))
    assert told.drops() == {"w0": [(key, Location(1, 1))]}
    told.stored("w0", [key], (1, 2, 1))
    assert told.drops() == {"w0": [(key, Location(1, 2, True))]}
    told.stored("w0", [other], (1, 3, 1))
    told.stored("w1", [other], (2, 2))
    assert told.drops() == {"w0": [(other, Location(1, 3, True))]}
    told.stored("w1", [other], (2, 9))
    assert told.drops() == {}, "it was the same writer"
    assert told.store.num_duplicates == 3 and told.store.reclaim.num_blocks == 2


def test_room_is_made_from_the_oldest_leaf_until_the_asker_has_enough_or_it_is_too_much() -> None:
    told = Told()
    theirs, ours, last = chain("theirs", 3), chain("ours", 3), chain("last", 40)
    told.stored("w1", theirs, *((2, slot) for slot in range(3)), now_s=1.0)
    told.stored("w0", ours, *((1, slot) for slot in range(3)), now_s=2.0)
    told.stored("w1", last, *((2, 10 + slot) for slot in range(40)), now_s=3.0)
    told.store.make_room("w0", 2)
    drops = told.drops()
    assert [key for key, _ in drops["w1"]] == theirs[::-1] and [key for key, _ in drops["w0"]] == ours[:0:-1]
    told.store.make_room("w0", 5)
    drops = told.drops()
    assert len(drops["w0"]) == 1 and len(drops["w1"]) == EXTRA * 5 - 1
    told.store.make_room("w0", 100)
    assert told.store.reclaim.num_blocks == 0 and told.store.num_reclaimed == 46


def test_a_dump_adds_what_is_new_takes_what_is_gone_and_makes_nothing_younger() -> None:
    told = Told()
    old, new, elsewhere = chain("old", 3), chain("new", 2), chain("elsewhere", 1)
    told.stored("w0", old, (1, 1), (1, 2), (1, 3), now_s=1.0)
    told.stored("w1", elsewhere, (2, 1), now_s=2.0)
    keys = [*old[:2], *new]
    words = [Location(*place).pack() for place in ((1, 1), (1, 2), (1, 4), (5, 1))]
    arrays = (block_keys.keys(b"".join(data)) for data in (keys, [ROOT, old[0], ROOT, new[0]]))
    for _ in told.store.replace("w0", [1, 5], *arrays, np.array(words, dtype=np.uint64), 3.0):
        pass
    assert told.store.reclaim.num_blocks == 5
    told.store.make_room("w1", 1)
    assert told.drops() == {
        "w0": [(old[1], Location(1, 2)), (old[0], Location(1, 1))],
        "w1": [(elsewhere[0], Location(2, 1))],
    }
