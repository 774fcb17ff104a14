"""One open request of a recipe, from its arrival to its terminal event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.trace import Span, StatusCode

from actors.recipe.converter import Converter, Prepared
from actors.recipe.doors import Door, InboxDoor
from actors.recipe.fields import Refusal
from actors.recipe.session import Session
from actors.recipe.submission import Submission
from actors.rules.errors import error_body, status
from actors.rules.logprobs import cut
from schemas.api import Answer, Call, Called, Protocol
from schemas.failure import Code, Failure
from schemas.request import Cancelled, CancelReason, End, Failed, FinishReason, TokenLogprobs


class Outcome(NamedTuple):
    """What became of some tokens. The request is over with `is_last`; `must_cancel`: its shard does not know that.
    `loss`: its shard does not have it any more."""

    items: list[bytes] = []
    is_last: bool = False
    status: int = 200
    failure: Failure | None = None
    reason: str = ""
    must_cancel: CancelReason | None = None
    is_gap: bool = False
    loss: Failure | None = None

    @property
    def retry_after_s(self) -> float:
        """For its client."""
        return self.failure.retry_after_s if self.failure else 0.0

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
    submission: Submission | None = None
    is_placing: bool = False
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

    @property
    def sent_as(self) -> str:
        """The id that its shard knows it by."""
        return self.submission.id if self.submission else self.id

    def begin(
        self, converter: Converter, prepared: Prepared, created_s: int, submission: Submission | None = None
    ) -> None:
        """The request is understood."""
        self.submission = submission
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
                if self.submission is not None:
                    self.submission.emitted(new)
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
