"""The slots of a decode replica."""

from __future__ import annotations

from msgspec import structs

from actors.decode.slots import RETENTION_S, Generation, Slots
from actors.decode.telling import BACKLOG_TOKENS, Telling
from actors.rules.grammars import head
from actors.rules.window import SILENCE_S
from kernels.timed import TimedEngine
from schemas.request import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    Limits,
    Preempted,
    Resend,
    TokensEmitted,
)
from tests.actors.builders import hand_over
from tests.actors.constrained import followed
from tests.actors.core import info

EOS = 1
STOP = Finished(reason=FinishReason.STOP)
LENGTH = Finished(reason=FinishReason.LENGTH)


def test_what_steps_give_goes_out_at_once_or_when_it_can_in_one_piece() -> None:
    words: list[None] = []
    telling, engine = Telling("decode/d0", lambda: words.append(None)), TimedEngine(info(), range(100, 1000))
    one, other = (Generation(hand_over(name, max_tokens=1 << 13), epoch=2) for name in ("r1", "r2"))
    sent = []
    for step in range(4):
        telling.step(one, [10 + step], engine)
        assert telling.may_send(0.0) == (step < 1)
        sent += [message.tokens for _, message in telling.take(0.0)]
    assert sent == [[10]] and not telling.is_idle(SILENCE_S + 1)
    telling.step(other, [7, EOS], engine)
    one.end = Cancelled()  # for whoever cancels it, which the entrypoint is not told
    telling.taken("e0", 0.0)
    ((_, message),) = telling.take(0.0)
    entries = (message.request_ids, message.first_indexes, message.counts, message.ends)
    assert entries == (["r1", "r2"], [1, 0], [3, 1], [(1, STOP)])
    assert message.tokens == [11, 12, 13, 7] and message.epochs == [2, 2]
    one.end = Preempted()
    telling.last_word(one)
    telling.taken("e0", 0.0)
    ((_, message),) = telling.take(0.0)
    assert (message.first_indexes, message.counts, message.ends) == ([4], [0], [(0, Preempted())])
    assert len(words) == 1 and not telling.is_idle(0.0) and telling.is_idle(SILENCE_S + 1)


def test_who_takes_no_tokens_is_waited_for_until_it_is_gone() -> None:
    telling, engine = Telling("decode/d0", lambda: None), TimedEngine(info(max_tokens=1 << 14), range(100, 1000))
    generation = Generation(hand_over(max_tokens=1 << 13), epoch=2)
    telling.step(generation, [5] * (BACKLOG_TOKENS - 1), engine)
    assert not telling.is_backlogged("e0")
    telling.step(generation, [5], engine)
    assert telling.is_backlogged("e0") and not telling.is_backlogged("e1")
    telling.drop("e0")
    assert not telling.is_backlogged("e0") and telling.is_idle(0.0) and telling.take(0.0) == []


def slots_of(num_slots: int, capacity_tokens: int = 1 << 20) -> Slots:
    return Slots(num_slots, capacity_tokens, max_tokens=1000)


class TestGeneration:
    def test_the_end_of_sequence_token_is_not_emitted_and_ends(self) -> None:
        generation = Generation(hand_over(max_tokens=10))
        assert generation.advance([5, 6, EOS, 7], EOS, 100) == [5, 6]
        assert generation.end == STOP and generation.tokens == [5, 6]

    def test_stops_at_its_own_limit(self) -> None:
        generation = Generation(hand_over(max_tokens=3))
        assert generation.advance([5, 6], EOS, 100) == [5, 6]
        assert generation.end is None
        assert generation.advance([7, 8, 9], EOS, 100) == [7]
        assert generation.end == LENGTH

    def test_stops_at_the_context_limit(self) -> None:
        generation = Generation(hand_over(num_tokens=98, max_tokens=50))
        assert generation.advance([5, 6, 7], EOS, 100) == [5, 6]
        assert generation.end == LENGTH


    def test_what_comes_with_output_goes_on_where_that_ends(self) -> None:
        offer = structs.replace(
            hand_over(num_tokens=300), num_output=40, limits=Limits(max_tokens=43, min_tokens=42), chain=None
        )
        generation = Generation(offer)
        assert (generation.num_prompt_tokens, generation.num_output, generation.num_wanted(1000)) == (260, 40, 303)
        assert generation.sampling.first_end == 260 + 42
        assert generation.advance([5], EOS, 1000) == [5] and generation.num_output == 41
        assert generation.advance([6, 7, 8], EOS, 1000) == [6, 7] and generation.end == LENGTH


class TestSlots:
    def test_room_is_counted_from_arrival(self) -> None:
        slots = slots_of(1)
        first = slots.arrive(hand_over("a"))
        assert first is not None and slots.arrive(hand_over("b")) is None and slots.running() == []
        first.epoch = 2
        assert slots.running() == [first]
        slots.leave(first, 0.0)
        slots.leave(first, 0.0)
        assert len(slots) == 0 and slots.arrive(hand_over("b")) is not None

    def test_the_same_request_does_not_arrive_twice(self) -> None:
        slots = slots_of(4)
        assert slots.arrive(hand_over("a")) is not None
        assert slots.arrive(hand_over("a")) is None

    def test_cancel_once(self) -> None:
        slots = slots_of(1)
        generation = slots.arrive(hand_over("a"))
        assert generation is not None and slots.cancel("a") and not slots.cancel("a") and not slots.cancel("zz")
        assert generation.end == Cancelled()

    def test_ended_requests_can_be_asked_for_and_refused_ones_not(self) -> None:
        slots = slots_of(2)
        kept, refused = slots.arrive(hand_over("kept")), slots.arrive(hand_over("refused"))
        assert kept is not None and refused is not None
        kept.epoch, kept.tokens, kept.end = 2, [5], STOP
        kept.grammar = followed().follow(head([]) + "start: /a/")
        slots.leave(kept, 0.0)
        slots.leave(refused, 0.0)
        assert [one.grammar for one in slots._ended.values()] == [None], "large, and of no use any more"
        asked = Resend(request_ids=["kept", "refused"], first_indexes=[0, 0], epochs=[2, 2])
        message = slots.resend("decode/d0", asked)
        assert message.counts == [1, 0] and message.ends[0] == (0, STOP) and isinstance(message.ends[1][1], Failed)
        assert slots.outputs.mean == 1
        later = slots.arrive(hand_over("later"))
        assert later is not None
        slots.leave(later, RETENTION_S + 0.1)
        assert isinstance(slots.resend("decode/d0", asked).ends[0][1], Failed)

    def test_of_one_that_came_with_output_only_what_follows_can_be_asked_for(self) -> None:
        slots = slots_of(1)
        generation = slots.arrive(structs.replace(hand_over("a", num_tokens=50), num_output=40))
        assert generation is not None
        generation.epoch, generation.tokens, generation.end = 7, [5, 6], Preempted()
        slots.leave(generation, 0.0)
        assert slots.outputs.mean == 0, "it has not ended"

        def asked(first: int) -> TokensEmitted:
            return slots.resend("decode/d0", Resend(request_ids=["a"], first_indexes=[first], epochs=[7]))

        assert (asked(41).tokens, asked(41).first_indexes, asked(41).ends) == ([6], [41], [(0, Preempted())])
        assert asked(40).tokens == [5, 6] and asked(42).ends == [(0, Preempted())]
        assert asked(39).tokens == [] and isinstance(asked(39).ends[0][1], Failed)

    def test_what_is_protected_has_all_its_room_at_once_and_what_never_fits_does_not_come(self) -> None:
        slots = slots_of(4, 1024)
        whole = slots.arrive(structs.replace(hand_over("a", 100, 400), is_protected=True))
        grows = slots.arrive(hand_over("b", 125, 400))
        assert whole is not None and whole.num_reserved == 500 and grows is not None and grows.num_reserved == 256
        assert slots.num_free_blocks == 8 - 4 - 2
        assert slots.promised_tokens == 512 + 384  # 256 tokens are expected, or a block
        assert slots.arrive(hand_over("c", 100, 400)) is None and slots.arrive(hand_over("d", 1, 100)) is not None
        small = Slots(4, 512, max_tokens=2000)
        assert small.arrive(hand_over("e", 100, 1000)) is None
