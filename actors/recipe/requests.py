"""The open requests of a recipe: whose they are, which of them have gone silent, and what shards say of them."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.context import Context

from actors.recipe.doors import Door, GatewayDoor
from actors.recipe.fields import Refusal
from actors.recipe.request import OpenRequest, Outcome
from actors.recipe.submission import ids as ids_of
from schemas.api import Call
from schemas.failure import Code, Failure
from schemas.request import CancelReason, Failed, LastWord, Preempted, Resend, TokensEmitted

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


class OpenRequests:
    """All of them, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}
        self._sent: dict[str, OpenRequest] = {}
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
        self._by_id[request.id] = self._sent[request.id] = request
        return request

    def move(self, request: OpenRequest, now_s: float) -> bool:
        """Its shard is lost: it has none. False if it cannot go to another one (any more)."""
        if not request.is_placing and not self.rename(request):
            return False
        request.shard, request.last_event_s = "", now_s
        request.num_seen, request.is_end_seen = request.next_index, False
        return True

    def rename(self, request: OpenRequest) -> bool:
        """It is for another shard now, which is to know it by another id. False if that cannot be (any more)."""
        submission, before = request.submission, request.sent_as
        if self._sent.get(before) is not request or submission is None or not submission.move():
            return False
        self._sent[request.sent_as] = self._sent.pop(before)
        return True

    def cancel(self, ids: list[str], shards: list[str]) -> tuple[bool, list[tuple[str, str]]]:
        """Mark those that are here; (shard, id) of whom to tell: its own shard, or all where that is not known."""
        was_here, told = False, list[tuple[str, str]]()
        for id in ids:
            request = self._by_id.get(id)
            if request is not None:
                was_here = request.is_cancelled = True
            if request is not None and request.shard:
                told.append((request.shard, request.sent_as))
            else:
                told += [(shard, sent) for shard in shards for sent in ids_of(id)]
        return was_here, told

    def remove(self, request: OpenRequest) -> bool:
        """False if it was not here any more."""
        if self._by_id.get(request.id) is not request:
            return False
        del self._by_id[request.id], self._sent[request.sent_as]
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
            request = self._sent.get(id)
            if request is not None:
                # Tokens may overtake the answer to Submit.
                request.shard = request.shard or shard_of(emitted)
                new, loss = tokens[start:stop], loss_of(ends.get(i), emitted.epochs[i])
                end = None if loss else ends.get(i)
                outcome = request.apply(first, new, end, now_s, cached.get(i, 0), said.get(i))
                outcomes.append((request, outcome._replace(loss=loss)))
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
            ids, indexes = [r.sent_as for r in some], [r.next_index for r in some]
            yield shard, some, Resend(request_ids=ids, first_indexes=indexes, epochs=[0] * len(some))


def resent(requests: list[OpenRequest]) -> None:
    """The question about these was answered, or not. What is behind still is asked after at the next look."""
    for request in requests:
        request.is_resending = False
        if request.is_behind:
            request.last_event_s = float("-inf")


def loss_of(end: LastWord | None, epoch: int) -> Failure | None:
    """Whether it is the end at this shard only, which does not know it (it was asked without an epoch), or stops."""
    if not isinstance(end, Failed):
        return None
    code = end.failure.code
    is_loss = code is Code.SHUTTING_DOWN or (code is Code.WORKER_LOST and not epoch)
    return end.failure if is_loss else None


def shard_of(emitted: TokensEmitted) -> str:
    """The id of the shard that sent these (`source` is role/id)."""
    return emitted.source.rpartition("/")[2]
