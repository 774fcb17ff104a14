"""The open requests of a recipe: whose they are, how far they are, which of them have gone silent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from actors.recipe.converter import Converter, Prepared
from actors.recipe.doors import Door, GatewayDoor, InboxDoor
from actors.recipe.fields import Refusal
from actors.recipe.session import Session
from actors.rules.errors import error_body, status
from actors.rules.logprobs import cut
from schemas.api import Answer, Call, Called, Protocol
from schemas.failure import Code, Failure
from schemas.request import (
    Cancelled,
    CancelReason,
    End,
    Failed,
    FinishReason,
    Preempted,
    Resend,
    TokenLogprobs,
    TokensEmitted,
)

tracer = trace.get_tracer("shoal")

SILENCE_S = 5.0
"""A request without an event for so long is asked after."""

MAX_GATHERED = 1 << 21
"""Logprobs in answers that are not given out yet, of all requests: some 500 MB."""

TOO_MANY = Failure(
    code=Code.OVERLOADED,
    message="too many logprobs to keep until their answers end: ask for fewer, or stream them (Chat Completions)",
)

RESEND_REQUESTS = 64
"""Requests in one question."""


class Outcome(NamedTuple):
    """What became of some tokens. The request is over with `is_last`; `must_cancel`: its shard does not know that."""

    items: list[bytes] = []
    is_last: bool = False
    status: int = 200
    failure: Failure | None = None
    reason: str = ""
    must_cancel: CancelReason | None = None
    is_gap: bool = False

    def answer(self) -> Answer:
        """The same to a gateway, for a request that has not begun. Only for a failure."""
        assert self.failure is not None
        return Answer(status=self.status, body=self.items[-1], failure=self.failure)


def refused(call: Call, failure: Failure) -> Answer:
    """The answer to a call that failed before anything was generated."""
    return Answer(status=status(failure), body=error_body(call.protocol, failure, call.request_id), failure=failure)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request from its arrival to its terminal event. Times are in seconds of the loop's clock."""

    id: str
    protocol: Protocol
    door: Door
    span: Span
    started_s: float
    last_event_s: float
    session: Session | None = None
    model: str = ""
    num_prompt_tokens: int = 0
    shard: str = ""
    next_index: int = 0
    num_seen: int = 0
    is_end_seen: bool = False
    is_resending: bool = False
    is_cancelled: bool = False
    is_closed: bool = False
    first_token_s: float = 0.0
    created_s: int = 0

    def begin(self, converter: Converter, prepared: Prepared, created_s: int) -> None:
        """The request is understood."""
        self.session = Session(converter, prepared, self.id, created_s)
        self.created_s = created_s
        self.model = prepared.model
        self.num_prompt_tokens = prepared.num_prompt_tokens
        if isinstance(self.door, InboxDoor):
            self.door.is_stream = prepared.is_stream
        self.span.set_attributes(prepared.attributes())

    def close(self, outcome: Outcome, now_s: float) -> dict[str, Any] | None:
        """End the span; what to record of the request, if it was understood. None the second time."""
        if self.is_closed:
            return None
        self.is_closed = True
        self.door.close()
        num_output, num_cached = (self.session.num_tokens, self.session.num_cached) if self.session else (0, 0)
        error = outcome.failure.code if outcome.failure else ""
        self.span.set_attribute("gen_ai.usage.output_tokens", num_output)
        self.span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)
        self.span.set_attribute("gen_ai.response.finish_reasons", [outcome.reason])
        if outcome.failure is not None:
            self.span.set_attribute("error.type", error)
            self.span.set_status(StatusCode.ERROR, outcome.failure.message)
        self.span.end()
        if self.session is None:
            return None
        return {
            "model": self.model,
            "duration_s": now_s - self.started_s,
            "first_token_s": self.first_token_s - self.started_s if self.first_token_s else 0.0,
            "num_input": self.num_prompt_tokens,
            "num_cached": num_cached,
            "num_output": num_output,
            "error": error,
        }

    def apply(
        self,
        first_index: int,
        tokens: list[int],
        end: End | None,
        now_s: float,
        num_cached: int = 0,
        logprobs: TokenLogprobs | None = None,
    ) -> Outcome:
        """Take tokens, and maybe the end, from the shard. Repeated ones are skipped; a gap changes nothing.

        `num_cached`: of the prompt's tokens, with the first of the answer's. `logprobs`: of the tokens.
        """
        self.last_event_s = now_s
        self.num_seen = max(self.num_seen, first_index + len(tokens))
        self.is_end_seen = self.is_end_seen or end is not None
        known = self.next_index - first_index
        if known < 0:
            return Outcome(is_gap=True)
        new = tokens[known:] if known else tokens
        session = self.session
        if session is None:
            return Outcome()
        items: list[bytes] = []
        if self.next_index == 0:
            session.num_cached = num_cached
        try:
            if new:
                self.next_index += len(new)
                self.first_token_s = self.first_token_s or now_s
                items = session.push(new, logprobs and cut(logprobs, known, len(tokens)))
                if session.is_stopped:
                    reason = CancelReason.STOP_SEQUENCE if end is None else None
                    return Outcome(
                        items + session.finish(FinishReason.STOP, self._unix_s()),
                        True,
                        reason="stop",
                        must_cancel=reason,
                    )
            if end is None:
                return Outcome(items)
            return self._end(items, session, end)
        except Refusal as refusal:
            return self.fail(refusal.failure, must_cancel=CancelReason.CLIENT)

    def _end(self, items: list[bytes], session: Session, end: End) -> Outcome:
        if isinstance(end, Failed):
            return self.fail(end.failure, items)
        if isinstance(end, Cancelled):
            return self.fail(Failure(code=Code.CANCELLED, message="the request was cancelled"), items)
        return Outcome(items + session.finish(end.reason, self._unix_s()), True, reason=end.reason.value)

    def fail(
        self, failure: Failure, items: list[bytes] | None = None, *, must_cancel: CancelReason | None = None
    ) -> Outcome:
        """The outcome of a request that ends in a failure, after these events."""
        last = self.session.fail(failure) if self.session else error_body(self.protocol, failure, self.id)
        return Outcome([*(items or []), last], True, status(failure), failure, "error", must_cancel)

    @property
    def num_gathered(self) -> int:
        """Logprobs kept for the end of its answer."""
        return self.session.num_gathered if self.session else 0

    def is_for(self, inbox: str) -> bool:
        """Whether its client listens there."""
        return isinstance(self.door, InboxDoor) and self.door.inbox == inbox

    def called(self, recipe: str, ignored: list[str]) -> Called:
        """The word to a gateway that items will follow."""
        is_stream = self.session is not None and self.session.is_stream
        return Called(recipe=recipe, request_id=self.id, is_stream=is_stream, ignored=ignored)

    def _unix_s(self) -> int:
        """Unix time of the last event: `created_s` is that of the first."""
        return self.created_s + int(self.last_event_s - self.started_s)

    @property
    def is_behind(self) -> bool:
        """Whether tokens or an end have been heard of that are not here."""
        return self.is_end_seen or self.num_seen > self.next_index


class OpenRequests:
    """All of them, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}
        self._strays: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_id.values()))

    def get(self, id: str) -> OpenRequest | None:
        """The open request with this id."""
        return self._by_id.get(id)

    def check_free(self, id: str) -> None:
        """Raise Refusal if a request with this id is open."""
        if id in self._by_id:
            raise Refusal(Code.DUPLICATE_REQUEST, "a request with this id is still running")

    def begin(self, call: Call, door: Door, context: Context, now_s: float) -> OpenRequest:
        """A new one, whose id is free; its span continues the trace of `context`."""
        span = tracer.start_span("recipe", context=context, attributes={"shoal.request.id": call.request_id})
        request = OpenRequest(call.request_id, call.protocol, door, span, started_s=now_s, last_event_s=now_s)
        self._by_id[request.id] = request
        return request

    def cancel(self, ids: list[str], shards: list[str]) -> tuple[bool, list[tuple[str, str]]]:
        """Mark those that are here; (shard, id) of whom to tell: its own shard, or all where that is not known."""
        was_here, told = False, list[tuple[str, str]]()
        for id in ids:
            request = self._by_id.get(id)
            if request is not None:
                was_here = request.is_cancelled = True
            told += [(shard, id) for shard in ([request.shard] if request and request.shard else shards)]
        return was_here, told

    def remove(self, request: OpenRequest) -> bool:
        """False if it was not here any more."""
        if self._by_id.get(request.id) is not request:
            return False
        del self._by_id[request.id]
        return True

    def of_gateway(self, gateway: str) -> list[OpenRequest]:
        """Those whose client is at this gateway."""
        return [r for r in self if isinstance(r.door, GatewayDoor) and r.door.gateway == gateway]

    def of_shard(self, shard: str) -> list[OpenRequest]:
        """Those that this entrypoint shard owns."""
        return [request for request in self if request.shard == shard]

    def silent(self, now_s: float) -> list[OpenRequest]:
        """Those submitted, without an event for SILENCE_S, and not being asked after."""
        return [r for r in self if r.shard and not r.is_resending and now_s - r.last_event_s > SILENCE_S]

    def apply(self, emitted: TokensEmitted, now_s: float) -> tuple[list[tuple[OpenRequest, Outcome]], list[str]]:
        """Give tokens and ends to the requests they are for: what became of each; and ids not open here.

        Each of those is told once in SILENCE_S: tokens on their way when a request was cancelled are no news. When more
        than MAX_GATHERED logprobs are kept for the ends of answers, the request with most of them fails.
        """
        ends = {i: end for i, end in emitted.ends if not isinstance(end, Preempted)}  # of no entrypoint's requests
        start, cached, tokens = 0, dict(emitted.cached), emitted.tokens
        outcomes, unknown, said = [], list[str](), dict(emitted.logprobs)
        for i, (id, first, count) in enumerate(
            zip(emitted.request_ids, emitted.first_indexes, emitted.counts, strict=True)
        ):
            stop = start + count
            request = self._by_id.get(id)
            if request is not None:
                # Tokens may overtake the answer to Submit.
                request.shard = request.shard or shard_of(emitted)
                new = tokens[start:stop]
                outcome = request.apply(first, new, ends.get(i), now_s, cached.get(i, 0), said.get(i))
                outcomes.append((request, outcome))
            elif i not in ends and now_s - self._strays.get(id, -SILENCE_S) >= SILENCE_S:
                unknown.append(id)
            start = stop
        if said and sum(request.num_gathered for request in self._by_id.values()) > MAX_GATHERED:
            most = max(self, key=lambda request: request.num_gathered)
            outcomes.append((most, most.fail(TOO_MANY, must_cancel=CancelReason.CLIENT)))
        if unknown:
            self._strays = {id: at for id, at in self._strays.items() if now_s - at < SILENCE_S}
            self._strays.update(dict.fromkeys(unknown, now_s))
        return outcomes, unknown


def resends(requests: list[OpenRequest]) -> Iterator[tuple[str, list[OpenRequest], Resend]]:
    """(shard, requests, question): what to ask whom about requests that may have missed something."""
    shards: dict[str, list[OpenRequest]] = {}
    for request in requests:
        shards.setdefault(request.shard, []).append(request)
    for shard, all_of_it in shards.items():
        for start in range(0, len(all_of_it), RESEND_REQUESTS):
            some = all_of_it[start : start + RESEND_REQUESTS]
            for request in some:
                request.is_resending = True
            ids, indexes = [r.id for r in some], [r.next_index for r in some]
            yield shard, some, Resend(request_ids=ids, first_indexes=indexes, epochs=[0] * len(some))


def resent(requests: list[OpenRequest]) -> None:
    """The question about these was answered, or not. What is behind still is asked after at the next look."""
    for request in requests:
        request.is_resending = False
        if request.is_behind:
            request.last_event_s = float("-inf")


def shard_of(emitted: TokensEmitted) -> str:
    """The id of the shard that sent these (`source` is role/id)."""
    return emitted.source.rpartition("/")[2]
