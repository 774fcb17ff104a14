"""A feed ends up with what the writer has, whatever becomes of its events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rules.feed import MAX_WAITING, Feed

Event = tuple[str, int, int]  # incarnation, seq, what it adds


class Writer:
    """Has numbers; adds one with each event; what it has survives its restarts."""

    def __init__(self) -> None:
        self.has: list[int] = []
        self.incarnation, self.seq, self.num_starts = "", 0, 0
        self.restart()

    def restart(self) -> None:
        self.num_starts += 1
        self.incarnation, self.seq = f"i{self.num_starts}", 0

    def add(self) -> Event:
        self.seq += 1
        self.has.append(len(self.has))
        return self.incarnation, self.seq, self.has[-1]


class Reader:
    """What a feed makes of it."""

    def __init__(self) -> None:
        self.feed: Feed[Event] = Feed()
        self.has: list[int] = []

    def hear(self, event: Event) -> None:
        self.apply(self.feed.event(event[0], event[1], event))

    def dump(self, dump: tuple[str, int, Sequence[int]]) -> None:
        self.has = list(dump[2])
        self.apply(self.feed.dumped(*dump[:2]))

    def apply(self, events: list[Event]) -> None:
        self.has += [number for _, _, number in events]

    def repair(self, writer: Writer) -> None:
        self.feed.asking()
        self.dump((writer.incarnation, writer.seq, list(writer.has)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_loss_doubling_and_disorder_is_repaired(data: st.DataObject) -> None:
    writer, reader, wire = Writer(), Reader(), list[Event]()
    dump: tuple[str, int, list[int]] | None = None
    for step in data.draw(st.lists(st.sampled_from("aaaaaahhhhhbblrda"), max_size=60)):
        if step == "a":
            wire.append(writer.add())
        elif step == "h" and wire:
            reader.hear(wire.pop(0))
        elif step == "b" and wire:  # any, and it comes again
            reader.hear(wire[data.draw(st.integers(0, len(wire) - 1))])
        elif step == "l" and wire:
            wire.pop(data.draw(st.integers(0, len(wire) - 1)))
        elif step == "r":
            writer.restart()
        elif step == "d" and dump is None and reader.feed.is_lost:
            reader.feed.asking()
            dump = writer.incarnation, writer.seq, list(writer.has)
        elif step == "d" and dump is not None:
            reader.dump(dump)
            dump = None
        if not reader.feed.is_lost:
            assert reader.has == writer.has[: len(reader.has)], "what a feed that is not lost has was so once"
    if dump is not None:
        reader.dump(dump)
    for event in data.draw(st.permutations(wire)):
        reader.hear(event)
    reader.feed.heartbeat(writer.incarnation, writer.seq)
    if reader.feed.is_lost:
        reader.repair(writer)
        assert not reader.feed.is_lost
    assert reader.has == writer.has


def settled() -> tuple[Writer, Reader]:
    writer, reader = Writer(), Reader()
    writer.add()
    assert reader.feed.is_lost, "it may have had something before anything was heard"
    reader.repair(writer)
    assert not reader.feed.is_lost
    return writer, reader


def test_events_in_order_need_no_dump_and_old_ones_are_passed_over() -> None:
    writer, reader = settled()
    events = [writer.add() for _ in range(3)]
    for event in [*events, *events]:
        reader.hear(event)
        reader.feed.heartbeat(writer.incarnation, event[1])
    assert reader.has == writer.has and not reader.feed.is_lost and not reader.feed._waiting


def test_the_number_that_is_due_is_not_enough_from_another_incarnation() -> None:
    writer, reader = settled()
    writer.restart()
    writer.add()
    reader.hear(writer.add())
    assert reader.feed.is_lost and reader.has == [0]


def test_a_late_event_of_an_earlier_incarnation_costs_one_dump() -> None:
    writer, reader = settled()
    late = writer.add()
    writer.restart()
    reader.feed.heartbeat(writer.incarnation, 0)
    reader.repair(writer)
    reader.hear(late)
    assert reader.feed.is_lost
    reader.repair(writer)
    assert not reader.feed.is_lost and reader.has == writer.has


def test_a_gap_a_restart_and_a_lost_last_event_each_need_a_dump() -> None:
    writer, reader = settled()
    writer.add()
    reader.hear(writer.add())
    assert reader.feed.is_lost and reader.has == [0]
    reader.repair(writer)
    assert not reader.feed.is_lost and reader.has == writer.has
    writer.add()
    reader.feed.heartbeat(writer.incarnation, writer.seq)
    assert reader.feed.is_lost
    reader.repair(writer)
    writer.restart()
    reader.feed.heartbeat(writer.incarnation, 0)
    assert reader.feed.is_lost


def test_what_comes_during_a_dump_is_applied_after_it_or_shows_that_it_was_not_enough() -> None:
    writer, reader = settled()
    reader.feed.lose()
    reader.feed.asking()
    before = writer.add()
    dump = writer.incarnation, writer.seq, list(writer.has)
    later = [writer.add() for _ in range(3)]
    for event in (later[1], before, later[0]):
        reader.hear(event)
    assert reader.has == [0], "nothing is applied to what is lost"
    reader.dump(dump)
    assert reader.has == [0, 1, 2, 3] and not reader.feed.is_lost
    reader.feed.lose()
    reader.feed.asking()
    dump = writer.incarnation, writer.seq, list(writer.has)
    writer.restart()
    reader.hear(writer.add())
    reader.dump(dump)
    assert reader.feed.is_lost, "that was another incarnation's"


def test_more_than_is_kept_while_it_is_lost_means_one_more_dump() -> None:
    writer, reader = settled()
    reader.feed.lose()
    reader.feed.asking()
    dump = writer.incarnation, writer.seq, list(writer.has)
    for _ in range(MAX_WAITING + 1):
        reader.hear(writer.add())
    assert not reader.feed._waiting
    reader.dump(dump)
    assert reader.feed.is_lost
    reader.repair(writer)
    assert reader.has == writer.has and not reader.feed.is_lost
