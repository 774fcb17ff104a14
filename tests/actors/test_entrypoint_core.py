"""The request state machine and the shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.entrypoint.owner import Owner
from actors.entrypoint.request import MAX_LOSSES, MAX_PREEMPTIONS, OVERDUE, Request, Verdict
from actors.entrypoint.shard import RETENTION_S, SILENCE_S, Shard
from actors.rules.emission import resend_answer
from actors.rules.hit import Hit
from schemas.bulk import Handle, Payload
from schemas.cache import HitShortened
from schemas.failure import Code, Failure
from schemas.handover import Claimed, ClaimRefused
from schemas.message import Role
from schemas.request import Cancelled, Failed, Finished, FinishReason, Limits, Preempted, Resend, TokensEmitted
from schemas.routing import Routed
from schemas.vision import Image
from tests.actors.builders import prompt_bytes, submit

STOP = Finished(reason=FinishReason.STOP)
TOTALS = {"prompt_tokens": 0, "cached_tokens": 0, "rebuilt": 0, "lost": 0, "approximate": 0}


def new() -> Request:
    return Request(submit(), itertools.count(1), heard_s=0.0)


def returned(epoch: int) -> HitShortened:
    return HitShortened(
        request_id="r1", epoch=epoch, num_blocks=0, start=0, approximate=False, reason="test", is_returned=True
    )


ROUTED = Routed(replica="p0", reservation=1, balancer="pb0")


def gives_back(first: int, epoch: int, tokens: Sequence[int] = ()) -> TokensEmitted:
    """What decode says with its last tokens."""
    return TokensEmitted(
        source="decode/d0",
        request_ids=["r1"],
        epochs=[epoch],
        first_indexes=[first],
        counts=[len(tokens)],
        tokens=list(tokens),
        ends=[(0, Preempted())],
    )


def decoding() -> Request:
    request = new()
    request.dispatch("p0", 0.0)
    assert request.claim(1, "d0", 0.0) == Claimed(epoch=2)
    return request


class TestRequest:
    def test_first_claim_wins_and_a_repeated_one_is_confirmed(self) -> None:
        request = decoding()
        assert request.claim(1, "d0", 1.0) == Claimed(epoch=2)
        assert isinstance(request.claim(1, "d1", 1.0), ClaimRefused)
        assert request.owner == Owner(Role.DECODE, "d0")

    def test_a_refused_dispatch_makes_its_claim_void(self) -> None:
        request = new()
        first = request.dispatch("p0", 0.0)
        request.refused()
        assert isinstance(request.claim(first, "d0", 0.0), ClaimRefused)
        second = request.dispatch("p1", 0.0)
        assert isinstance(request.claim(first, "d0", 0.0), ClaimRefused)
        assert isinstance(request.claim(second, "d0", 0.0), Claimed)

    def test_a_returned_request_waits_again_and_what_was_said_before_is_void(self) -> None:
        request = new()
        first = request.dispatch("p0", 0.0)
        assert not request.shortened(returned(first)), "whoever dispatched it is still at it, and goes on"
        assert request.must_be_placed() and request.num_returns == 1
        second = request.dispatch("p0", 0.0)
        request.dispatched(0.0)
        request.is_placing = False
        assert not request.shortened(returned(first))
        assert isinstance(request.claim(first, "d0", 0.0), ClaimRefused) and request.epoch == second
        assert request.shortened(returned(second)) and not request.shortened(returned(second))
        assert request.must_be_placed() and isinstance(request.claim(second, "d0", 0.0), ClaimRefused)

    def test_what_decode_has_or_what_has_ended_is_not_returned(self) -> None:
        request = decoding()
        request.is_placing = False
        for epoch in (0, 1, 2):
            assert not request.shortened(returned(epoch)) and request.owner == Owner(Role.DECODE, "d0")
        ended = new()
        epoch = ended.dispatch("p0", 0.0)
        ended.is_placing = False
        assert ended.finish(Cancelled(), 0.0) and not ended.shortened(returned(epoch))
        assert not ended.must_be_placed()

    def test_a_route_says_what_is_to_be_done_for_whom_and_until_when(self) -> None:
        limits = Limits(max_tokens=1, deadline_ns=9)
        submitted = submit(num_tokens=300, tenant="acme", limits=limits, exact=True)
        route = Request(submitted, itertools.count(1), 0.0).route()
        assert (route.num_new, route.num_cached, route.num_replayed, route.num_blocks) == (300, 0, 0, 0)
        assert (route.tenant, route.deadline_ns, route.is_exact) == ("acme", 9, True)

    def test_tokens_of_another_epoch_do_not_count(self) -> None:
        request = decoding()
        assert request.accept(1, 0, [5], None, 0.0) is Verdict.STALE
        assert request.accept(3, 0, [5], None, 0.0) is Verdict.STALE
        assert request.tokens == []

    def test_duplicates_overlaps_and_gaps(self) -> None:
        request = decoding()
        assert request.accept(2, 0, [1, 2], None, 0.0) is Verdict.NEWS
        assert request.accept(2, 0, [1, 2], None, 0.0) is Verdict.STALE
        assert request.accept(2, 3, [4], STOP, 0.0) is Verdict.GAP
        assert request.end is None
        assert request.accept(2, 1, [2, 3, 4], STOP, 0.0) is Verdict.NEWS
        assert request.tokens == [1, 2, 3, 4] and request.end == STOP

    def test_nothing_after_the_end(self) -> None:
        request = decoding()
        assert request.finish(Cancelled(), 1.0)
        assert not request.finish(STOP, 2.0)
        assert request.accept(2, 0, [1], STOP, 2.0) is Verdict.STALE
        assert isinstance(request.claim(2, "d1", 2.0), ClaimRefused)
        assert request.end == Cancelled() and request.tokens == []

    @given(st.data())
    def test_any_order_loss_and_duplication_gives_a_prefix(self, data: st.DataObject) -> None:
        request, truth = decoding(), list(range(20))
        pieces = data.draw(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 6)), max_size=40))
        for first, count in pieces:
            request.accept(2, first, truth[first : first + count], None, 0.0)
            assert request.tokens == truth[: len(request.tokens)]


class TestRebuilding:
    """What its owner has let go of goes on from the output so far."""

    def given_back(self, num_tokens: int, **fields: object) -> tuple[Shard, Request]:
        shard = Shard("e0")
        request = shard.submit(submit(num_tokens=5, **fields), 0.0)  # type: ignore[arg-type]
        assert request is not None
        request.prompt = prompt_bytes(5)
        request.dispatch("p0", 0.0)
        request.hit, request.is_placing = Hit(0, 3), False
        assert isinstance(request.claim(request.epoch, "d0", 0.0), Claimed)
        shard.accept(request, request.epoch, 0, list(range(num_tokens)), None, 0.0)
        heard = shard.hear(gives_back(num_tokens, request.epoch), 0.0)
        assert heard.given_back == [request] and not heard.news
        return shard, request

    def test_it_waits_with_its_output_behind_its_prompt(self) -> None:
        shard, request = self.given_back(4)
        assert request.must_be_placed() and request.is_placing
        asked = shard.resend(Resend(request_ids=["r1"], first_indexes=[1], epochs=[0]))
        assert (asked.tokens, asked.ends) == ([1, 2, 3], []), "its recipe may ask meanwhile"
        assert request.text == prompt_bytes(5) + np.arange(4, dtype="<u4").tobytes()
        assert request.route().num_new == 9
        epoch = request.dispatch("p1", 0.0)
        message = request.to_dispatch("e0", ROUTED, Payload(inline=request.text))
        assert (message.num_prompt_tokens, message.num_output, message.is_protected) == (9, 4, False)
        assert request.num_cached(0) == 3 and not request.is_approximate
        assert isinstance(request.claim(epoch, "d1", 0.0), Claimed)
        assert request.accept(request.epoch, 4, [4], None, 0.0) is Verdict.NEWS and request.tokens == list(range(5))
        assert request.attributes()["shoal.rebuilt"] == 1 and shard.detail()["cached_tokens"] == 3

    def test_tokens_that_come_with_it_are_taken_and_those_that_are_missing_asked_for(self) -> None:
        shard, request = self.given_back(0)
        request.dispatch("p0", 0.0)
        request.claim(request.epoch, "d0", 0.0)
        epoch = request.epoch
        heard = shard.hear(gives_back(2, epoch), 0.0)
        assert heard.gaps == [request] and not heard.given_back and request.epoch == epoch
        heard = shard.hear(gives_back(0, epoch, [7, 8]), 0.0)
        ((_, first, tokens, end, _),) = heard.news
        assert (first, tokens, end) == (0, [7, 8], None) and request.must_be_placed()
        assert shard.hear(gives_back(0, epoch, [7, 8]), 0.0) == ([], [], [], [], [])

    def test_much_output_is_taken_for_prompt_which_is_approximate_and_for_exact_ones_it_is_not(self) -> None:
        for num_tokens, exact, is_approximate in ((1024, False, False), (1025, False, True), (1025, True, False)):
            _, request = self.given_back(num_tokens, exact=exact)
            request.dispatch("p0", 0.0)
            assert request.is_approximate is is_approximate
            assert request.num_bounded == (5 if num_tokens == 1024 else 5 + num_tokens)

    def test_what_was_approximate_stays_so_while_there_is_output_of_it(self) -> None:
        for num_tokens in (0, 1):
            _, request = self.given_back(0)
            request.dispatch("p0", 0.0)
            request.is_approximate = True
            request.claim(request.epoch, "d0", 0.0)
            request.accept(request.epoch, 0, [5] * num_tokens, Preempted(), 0.0)
            request.rebuild()
            request.dispatch("p0", 0.0)
            assert request.is_approximate is bool(num_tokens)

    def test_it_is_protected_after_some_times_and_always_with_images(self) -> None:
        pixels = Handle(address="mem://x", key="k", generation=1, size_bytes=3, checksum=0)
        image = Image(start=0, num_tokens=1, digest="ab" * 16, width=1, height=1, vision="v", pixels=pixels)
        assert Request(submit(images=[image]), itertools.count(1), 0.0).is_protected
        _, request = self.given_back(1)
        for _ in range(MAX_PREEMPTIONS - 1):
            request.dispatch("p0", 0.0)
            assert not request.to_dispatch("e0", ROUTED, Payload()).is_protected
            request.claim(request.epoch, "d0", 0.0)
            assert request.accept(request.epoch, 1, [], Preempted(), 0.0) is Verdict.GIVEN_BACK
            request.rebuild()
        request.dispatch("p0", 0.0)
        assert request.to_dispatch("e0", ROUTED, Payload()).is_protected


class TestShard:
    def test_nothing_said_of_an_earlier_request_of_the_same_id_counts(self) -> None:
        shard = Shard("e0")
        first = shard.submit(submit(), 0.0)
        assert first is not None
        old = first.dispatch("p0", 0.0)
        shard.finish(first, Cancelled(), 1.0)
        second = shard.submit(submit(), 2.0)
        assert second is not None
        second.dispatch("p0", 2.0)
        assert isinstance(second.claim(old, "d0", 2.0), ClaimRefused)
        assert shard.accept(second, old, 0, [1], STOP, 2.0) is Verdict.STALE

    def test_who_sends_for_a_request_it_does_not_hold_is_told_once_in_a_while(self) -> None:
        shard = Shard("e0")
        assert shard.is_new_stray("decode/d0", "r1", 0.0)
        assert not shard.is_new_stray("decode/d0", "r1", SILENCE_S - 0.1)
        assert shard.is_new_stray("decode/d1", "r1", 0.1)
        assert shard.is_new_stray("decode/d0", "r1", SILENCE_S)

    def test_who_waits_for_the_answer_to_its_claim_is_not_told_to_let_go(self) -> None:
        shard = Shard("e0")
        request = shard.submit(submit(), 0.0)
        assert request is not None
        assert isinstance(request.claim(request.dispatch("p0", 0.0), "d0", 0.0), Claimed)
        for epoch, strays in ((0, []), (request.epoch - 1, [("r1", request.epoch - 1)])):
            said = TokensEmitted(
                source="decode/d0", request_ids=["r1"], epochs=[epoch], first_indexes=[0], counts=[0], tokens=[]
            )
            assert shard.hear(said, 0.0).strays == strays

    def test_one_whose_owner_does_not_have_it_is_lost_and_not_ended(self) -> None:
        shard = Shard("e0")
        request = shard.submit(submit(), 0.0)
        assert request is not None
        epoch, unknown = request.dispatch("p0", 0.0), Failed(failure=Failure(code=Code.WORKER_LOST, message="gone"))
        answer = resend_answer("prefill/p0", shard.missed([request]), lambda id: None)
        heard = shard.hear(answer, 0.0)
        assert heard.lost == [request] and request.end is None and heard.news == []
        assert [shard.lose(request) for _ in range(MAX_LOSSES)] == [True] * (MAX_LOSSES - 1) + [False]
        request.refused()
        assert request.accept(epoch, 0, [], unknown, 0.0) is Verdict.STALE

    def test_one_live_request_per_id(self) -> None:
        shard = Shard("e0")
        first = shard.submit(submit(), 0.0)
        assert first is not None and shard.submit(submit(), 0.0) is None
        shard.finish(first, STOP, 1.0)
        assert shard.submit(submit(), 2.0) is not None
        assert shard.num_live == 1

    def test_silence_is_a_lost_worker_and_no_deadline_but_its_own(self) -> None:
        request = Shard("e0").submit(submit(limits=Limits(max_tokens=1, deadline_ns=1000)), 0.0)
        assert request is not None
        silence = Failure(code=Code.DEADLINE_EXCEEDED, message="no answer")
        assert request.failed_by(silence, 1000).failure.code is Code.WORKER_LOST
        assert request.failed_by(silence, 1001).failure == OVERDUE
        full = Failure(code=Code.OVERLOADED, message="full", retry_after_s=1.0)
        assert request.failed_by(full, 1001).failure == full

    def test_silent_owners_are_named_and_overdue_requests_found(self) -> None:
        shard = Shard("e0")
        request = shard.submit(submit(limits=Limits(max_tokens=1, deadline_ns=1000)), 0.0)
        assert request is not None and shard.silent(10.0) == {}
        request.dispatch("p0", 10.0)
        assert shard.silent(10.0 + SILENCE_S + 0.1) == {}, "it need not have arrived there yet"
        request.dispatched(10.0)
        assert shard.silent(10.0 + SILENCE_S + 0.1) == {Owner(Role.PREFILL, "p0"): [request]}
        assert shard.overdue(1000) == [] and shard.overdue(1001) == [request]

    def test_ended_requests_can_be_asked_for_until_retention_is_over(self) -> None:
        shard = Shard("e0")
        request = shard.submit(submit(), 0.0)
        assert request is not None
        shard.finish(request, STOP, 5.0)
        asked = Resend(request_ids=["r1"], first_indexes=[0], epochs=[0])
        shard.forget_old(5.0 + RETENTION_S)
        assert shard.resend(asked).ends == [(0, STOP)]
        shard.forget_old(5.1 + RETENTION_S)
        assert shard.get("r1") is None

    def test_prompts_and_what_was_cached_of_them_count_once_their_first_tokens_came(self) -> None:
        shard = Shard("e0")
        for number, start in enumerate((0, 256)):
            request = shard.submit(submit(f"r{number}", num_tokens=512), 0.0)
            assert request is not None
            epoch = request.dispatch("p0", 0.0)
            request.hit = Hit(start // 128, start)
            assert shard.detail() == {**TOTALS, "prompt_tokens": number * 512}
            shard.accept(request, epoch, 0, [1], None, 0.0)
            shard.accept(request, epoch, 0, [1, 2], STOP, 0.0)
        given_up = shard.submit(submit("r2"), 0.0)
        assert given_up is not None and shard.finish(given_up, Cancelled(), 0.0)
        assert shard.detail() == {**TOTALS, "prompt_tokens": 1024, "cached_tokens": 256}


class OneEnd(RuleBasedStateMachine):
    """However the events of a request come, it has one owner at a time and ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard("e0")
        request = self.shard.submit(submit(), 0.0)
        assert request is not None
        self.request = request
        self.ends: list[Any] = []
        self.epochs: set[int] = set()
        self.num_placing = 1
        self.is_asking = False

    @precondition(lambda self: self.num_placing and not self.is_asking)
    @rule(replica=st.sampled_from(["p0", "p1"]))
    def dispatch(self, replica: str) -> None:
        """Whoever places it asks the next replica, or has nothing to do any more."""
        if self.request.must_be_placed():
            epoch = self.request.dispatch(replica, 0.0)
            assert epoch not in self.epochs
            self.epochs.add(epoch)
            self.asked, self.is_asking = epoch, True
        else:
            self.num_placing, self.request.is_placing = 0, False

    @precondition(lambda self: self.is_asking)
    @rule(is_taken=st.booleans())
    def answer(self, is_taken: bool) -> None:
        """Its answer, which may come behind the claim, or behind the return."""
        self.is_asking = False
        if self.request.epoch != self.asked:
            return
        if is_taken:
            self.request.dispatched(0.0)
        else:
            self.request.refused()
            self.epochs.add(self.request.epoch)

    @rule(behind=st.integers(0, 3))
    def give_back(self, behind: int) -> None:
        before, owner, is_over = self.request.epoch, self.request.owner, self.request.end is not None
        must_begin = self.request.shortened(returned(before - behind))
        self.num_placing += must_begin
        if self.request.epoch != before:
            assert not behind and not is_over and owner is not None and owner.role is Role.PREFILL
            assert self.request.epoch not in self.epochs
            self.epochs.add(self.request.epoch)
        else:
            assert self.request.owner == owner and not must_begin

    @rule(behind=st.integers(0, 3), replica=st.sampled_from(["d0", "d1"]))
    def claim(self, behind: int, replica: str) -> None:
        before, owner = self.request.epoch, self.request.owner
        answer = self.request.claim(before - behind, replica, 0.0)
        if isinstance(answer, Claimed) and answer.epoch != before:
            assert answer.epoch not in self.epochs
            self.epochs.add(answer.epoch)
        elif isinstance(answer, Claimed):
            assert owner == Owner(Role.DECODE, replica)
        else:
            assert self.request.owner == owner

    @rule(behind=st.integers(0, 2), first=st.integers(0, 5), count=st.integers(0, 3), is_last=st.booleans())
    def tokens(self, behind: int, first: int, count: int, is_last: bool) -> None:
        was_over, known = self.request.end is not None, len(self.request.tokens)
        end = STOP if is_last else None
        news = list(range(first, first + count))
        verdict = self.shard.accept(self.request, self.request.epoch - behind, first, news, end, 0.0)
        if was_over or behind:
            assert verdict is Verdict.STALE and len(self.request.tokens) == known
        if not was_over and self.request.end is not None:
            self.ends.append(self.request.end)

    @precondition(lambda self: self.request.owner is not None and self.request.owner.role is Role.DECODE)
    @rule(behind=st.integers(0, 2))
    def preempt(self, behind: int) -> None:
        before, owner, is_over = self.request.epoch, self.request.owner, self.request.end is not None
        heard = self.shard.hear(gives_back(len(self.request.tokens), before - behind), 0.0)
        self.num_placing += len(heard.given_back)
        if self.request.epoch != before:
            assert not behind and not is_over and self.request.epoch not in self.epochs
            self.epochs.add(self.request.epoch)
        else:
            assert self.request.owner == owner and not heard.given_back

    @rule()
    def cancel(self) -> None:
        if self.shard.finish(self.request, Cancelled(), 0.0):
            self.ends.append(self.request.end)

    @invariant()
    def one_places_it_while_it_waits(self) -> None:
        assert self.num_placing == self.request.is_placing <= 1
        assert self.num_placing or not self.request.must_be_placed()

    @invariant()
    def tokens_are_in_order_and_the_end_is_one(self) -> None:
        assert self.request.tokens == list(range(len(self.request.tokens)))
        assert len(self.ends) <= 1 and self.shard.num_live == 1 - len(self.ends)


TestOneEnd = OneEnd.TestCase
