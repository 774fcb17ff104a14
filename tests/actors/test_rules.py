"""Ownership, emission, window, outbox."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.emission import MAX_BYTES, MAX_TOKENS, Emission, Held, resend_answer
from actors.rules.outbox import Outbox
from actors.rules.owner import EXPIRY_S, Members, choose
from actors.rules.window import SILENCE_S, Window
from schemas.failure import Code, Failure
from schemas.request import Failed, Finished, FinishReason, Resend, TokenLogprobs

STOP = Finished(reason=FinishReason.STOP)


class TestChoose:
    @given(st.sets(st.text(min_size=1, max_size=4), min_size=2, max_size=8), st.lists(st.text(max_size=6), max_size=50))
    def test_a_leaving_member_moves_only_its_own_keys(self, members: set[str], keys: list[str]) -> None:
        gone = min(members)
        for key in keys:
            before = choose(key, members)
            if before != gone:
                assert choose(key, members - {gone}) == before

    def test_keys_spread_over_all_members(self) -> None:
        owners = [choose(str(key), ["a", "b", "c", "d"]) for key in range(4000)]
        assert all(800 < owners.count(member) < 1200 for member in "abcd")

    def test_no_members_is_an_error(self) -> None:
        with pytest.raises(ValueError):
            choose("k", [])


class TestMembers:
    def test_alive_until_expiry_and_news_on_restart(self) -> None:
        members = Members()
        assert members.saw("a", "1", 0.0)
        assert not members.saw("a", "1", 1.0)
        assert members.saw("a", "2", 2.0)
        assert members.alive(2.0 + EXPIRY_S - 0.1) == ["a"]
        assert members.alive(2.0 + EXPIRY_S) == []
        assert members.saw("a", "2", 9.0), "nothing was kept of it"

    def test_forget_is_idempotent(self) -> None:
        members = Members()
        members.saw("a", "1", 0.0)
        members.forget("a")
        members.forget("a")
        assert members.alive(0.0) == []


class TestEmission:
    def test_struct_of_arrays(self) -> None:
        emission = Emission("decode/d0")
        emission.add("a", 2, 0, [5, 6])
        emission.add("b", 3, 4, [], STOP)
        (message,) = emission.take()
        assert (message.request_ids, message.epochs, message.first_indexes) == (["a", "b"], [2, 3], [0, 4])
        assert (message.counts, message.tokens, message.ends) == ([2, 0], [5, 6], [(1, STOP)])
        assert emission.take() == []

    def test_what_was_cached_is_said_once_with_the_first_tokens(self) -> None:
        emission = Emission("entrypoint/e0")
        emission.add("a", 1, 0, [5], None)
        emission.add("b", 1, 0, range(MAX_TOKENS + 1), STOP, 256)
        (message,) = emission.take()
        assert message.request_ids == ["a", "b", "b"]
        assert (message.cached, message.ends) == ([(1, 256)], [(2, STOP)])
        emission.add("c", 1, 0, [5])
        assert emission.take()[0].cached == []

    def test_steps_that_wait_together_are_one_entry(self) -> None:
        emission = Emission("decode/d0")
        for step in range(3):
            emission.add("a", 1, 2 * step, [step, step], STOP if step == 2 else None)
            emission.add("b", step, step, [7])  # of another epoch each time: not the same holder's
            emission.add("c", 1, 2 * step, [8])  # with gaps
            emission.add("d", 1, step, [9], logprobs=TokenLogprobs(sampled=[-1.0]))
        (message,) = emission.take()
        entries = list(zip(message.request_ids, message.epochs, message.first_indexes, message.counts, strict=True))
        assert [entry for entry in entries if entry[0] == "a"] == [("a", 1, 0, 6)]
        assert message.tokens[:6] == [0, 0, 1, 1, 2, 2] and message.ends == [(0, STOP)]
        assert len(entries) == 1 + 3 + 3 + 3 and len(message.logprobs) == 3
        emission.add("a", 1, 6, [5])
        assert emission.take()[0].first_indexes == [6], "what has left is joined by nothing"

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3 * MAX_TOKENS // 2)), max_size=6))
    def test_splitting_loses_nothing_and_keeps_order(self, adds: list[tuple[str, int]]) -> None:
        emission, sent = Emission("s"), {"a": 0, "b": 0, "c": 0}
        for request_id, count in adds:
            emission.add(request_id, 1, sent[request_id], range(sent[request_id], sent[request_id] + count))
            sent[request_id] += count
        got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        for message in emission.take():
            assert len(msgspec.msgpack.encode(message)) <= MAX_BYTES
            start = 0
            arrays = zip(message.request_ids, message.first_indexes, message.counts, strict=True)
            for request_id, first, count in arrays:
                assert first == len(got[request_id])
                got[request_id].extend(message.tokens[start : start + count])
                start += count
        assert got == {request_id: list(range(count)) for request_id, count in sent.items()}


    def test_many_long_errors_fit_the_size_contract_too(self) -> None:
        emission = Emission("entrypoint/e0")
        failure = Failure(code=Code.WORKER_LOST, message="wörter " * 100)
        for i in range(3000):
            emission.add(f"{i:032x}", 1 << 62, 1 << 31, [(1 << 32) - 1] * 16, Failed(failure=failure), 1 << 20)
        messages = emission.take()
        assert sum(len(message.ends) for message in messages) == 3000
        assert all(len(msgspec.msgpack.encode(message)) <= MAX_BYTES for message in messages)


class TestResend:
    @pytest.mark.parametrize("held", [None, Held(8, [5, 5, 5, 5], None), Held(8, [5], STOP)])
    def test_requests_that_are_not_held_end_as_lost_under_the_epoch_asked_with(self, held: Held | None) -> None:
        """Unknown ones, and those of an owner that is over: whoever asks would ask for ever."""
        asked = Resend(request_ids=["gone"], first_indexes=[3], epochs=[9])
        message = resend_answer("decode/d0", asked, lambda _: held)
        assert message.epochs == [9]
        ((index, end),) = message.ends
        assert index == 0 and isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST

    def test_one_that_waits_for_the_answer_to_its_claim_is_not_lost(self) -> None:
        asked = Resend(request_ids=["a"], first_indexes=[3], epochs=[9])
        message = resend_answer("decode/d0", asked, lambda _: Held(0, [5, 5, 5, 5], None))
        assert (message.epochs, message.ends) == ([0], [])

    def test_tokens_from_the_index_asked_for_and_the_end(self) -> None:
        asked = Resend(request_ids=["a"], first_indexes=[2], epochs=[1])
        message = resend_answer("s", asked, lambda _: Held(4, [10, 11, 12], STOP))
        assert (message.epochs, message.first_indexes, message.tokens, message.ends) == ([4], [2], [12], [(0, STOP)])

    def test_an_answer_that_does_not_fit_is_cut_and_has_no_end(self) -> None:
        asked = Resend(request_ids=["a", "b"], first_indexes=[0, 0], epochs=[1, 1])
        held = {"a": Held(1, list(range(MAX_TOKENS + 5)), STOP), "b": Held(1, [7], STOP)}
        message = resend_answer("s", asked, held.get)
        assert message.counts == [MAX_TOKENS, 0] and message.ends == []


def test_an_outbox_is_idle_when_all_was_taken_or_will_never_be() -> None:
    outbox = Outbox("s")
    assert outbox.is_idle(0.0)
    outbox.add("d", "r", 1, 0, [5])
    assert not outbox.is_idle(0.0)
    outbox.take(0.0)
    assert not outbox.is_idle(SILENCE_S) and outbox.is_idle(SILENCE_S + 0.1)
    outbox.add("d", "r", 1, 1, [6])
    outbox.take(9.0)
    assert not outbox.is_idle(9.0)
    outbox.taken("d", 9.1)
    assert outbox.is_idle(9.1)


class TestWindow:
    def test_opens_when_all_that_went_has_its_receipt(self) -> None:
        window = Window()
        assert window.may_send(0.0)
        window.sent(0.0)
        window.sent(0.0)
        window.taken(0.1)
        assert not window.may_send(0.2)
        window.taken(0.2)
        assert window.may_send(0.2)

    def test_lost_receipts_open_it_by_time(self) -> None:
        window = Window()
        window.sent(5.0)
        assert not window.may_send(5.0 + SILENCE_S)
        assert window.may_send(5.1 + SILENCE_S)
        window.sent(7.0)
        window.taken(7.1)  # of the first, perhaps: a receipt is as good as another
        assert window.may_send(7.1)


class TestOutbox:
    def test_gathers_behind_a_shut_window(self) -> None:
        outbox = Outbox("s")
        outbox.add("x", "r", 1, 0, [0])
        assert len(outbox.take(0.0)) == 1
        outbox.add("x", "r", 1, 1, [1])
        outbox.add("x", "r", 1, 2, [2])
        outbox.add("y", "q", 1, 0, [9])
        assert [destination for destination, _ in outbox.take(0.1)] == ["y"]
        outbox.taken("x", 0.2)
        ((destination, message),) = outbox.take(0.2)
        assert destination == "x" and message.tokens == [1, 2]

    def test_nothing_waits_for_a_dropped_destination(self) -> None:
        outbox = Outbox("s")
        outbox.add("x", "r", 1, 0, [0])
        outbox.take(0.0)
        outbox.add("x", "r", 1, 1, [1])
        assert not outbox.may_send("x", 0.0)
        outbox.drop("x")
        assert outbox.may_send("x", 0.0) and outbox.take(0.0) == []
