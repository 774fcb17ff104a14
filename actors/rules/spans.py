"""How the span of a request ends: what it made, and why it stopped."""

from __future__ import annotations

from opentelemetry.trace import Span, StatusCode

from schemas.request import Failed, Finished, LastWord, Preempted


def end_span(span: Span, num_output: int, end: LastWord | None) -> None:
    """Say how many tokens came out and how it ended (None: it was handed on or stopped), and end the span."""
    span.set_attribute("gen_ai.usage.output_tokens", num_output)
    if isinstance(end, Finished):
        span.set_attribute("gen_ai.response.finish_reasons", [end.reason])
    elif isinstance(end, Failed):
        span.set_attribute("error.type", end.failure.code)
        span.set_status(StatusCode.ERROR, end.failure.message)
    elif isinstance(end, Preempted):
        span.set_attribute("shoal.preempted", True)
    span.end()
