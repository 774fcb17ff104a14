"""The spans of requests in a prefill replica: one for the whole stay of each, one for its present phase."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from schemas.failure import Failure

tracer = trace.get_tracer("shoal")


class Phases:
    """Open spans by request id."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._spans: dict[str, tuple[Span, Span]] = {}

    def begin(self, request_id: str, context: Context, phase: str) -> None:
        """It is here, in its first phase; its spans continue the trace of `context`."""
        stay = tracer.start_span("prefill", context=context, attributes={"shoal.replica": self._replica})
        self._spans[request_id] = (stay, _child(phase, stay))

    def next(self, request_id: str, phase: str) -> Span:
        """One phase ends, and this one begins."""
        stay, last = self._spans[request_id]
        last.end()
        self._spans[request_id] = (stay, _child(phase, stay))
        return self._spans[request_id][1]

    def end(self, request_id: str) -> None:
        """It leaves. Idempotent."""
        for span in reversed(self._spans.pop(request_id, ())):
            span.end()

    def end_all(self) -> None:
        """All of them leave."""
        for request_id in list(self._spans):
            self.end(request_id)


def note_failure(failure: Failure) -> None:
    """On the span at hand."""
    span = trace.get_current_span()
    span.set_attribute("error.type", failure.code)
    span.set_status(StatusCode.ERROR, failure.message)


def _child(name: str, parent: Span) -> Span:
    return tracer.start_span(name, context=trace.set_span_in_context(parent))
