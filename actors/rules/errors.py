"""A failure in the words of each public protocol."""

from __future__ import annotations

import orjson

from schemas.api import Protocol
from schemas.failure import FAILURES, Code, Failure

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}
_OPENAI_CODES = {Code.RATE_LIMITED: "rate_limit_exceeded"}
"""Where OpenAI has a word of its own."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    424: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def status(failure: Failure) -> int:
    """The HTTP status of a failure."""
    return FAILURES[failure.code].http_status


def error_body(protocol: Protocol, failure: Failure, request_id: str) -> bytes:
    """The JSON body of a request that failed before its first event, as the protocol's SDKs expect it."""
    if protocol in (Protocol.MESSAGES, Protocol.COUNT_TOKENS):
        return orjson.dumps(_anthropic(failure, request_id))
    return orjson.dumps({"error": _openai(failure, request_id)})


def error_event(protocol: Protocol, failure: Failure, request_id: str, sequence_number: int) -> bytes:
    """The last event of a stream that failed after its first one. `sequence_number` is for Responses."""
    if protocol is not Protocol.RESPONSES:
        return error_body(protocol, failure, request_id)
    error = _openai(failure, request_id)
    event = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
    # The OpenAI SDK raises on a truthy `error`; the fields beside it are the documented event.
    return orjson.dumps({**event, "sequence_number": sequence_number, "error": error})


def _openai(failure: Failure, request_id: str) -> dict[str, str | None]:
    http_status = status(failure)
    kind = _OPENAI_TYPES.get(http_status, "server_error" if http_status >= 500 else "invalid_request_error")
    return {
        "message": _sentence(failure, request_id),
        "type": kind,
        "param": failure.field or None,
        "code": _OPENAI_CODES.get(failure.code, failure.code.value),
    }


def _anthropic(failure: Failure, request_id: str) -> dict[str, object]:
    message = _sentence(failure, request_id)
    if failure.field and failure.field not in message:
        message = f"{failure.field}: {message}"
    kind = _ANTHROPIC_TYPES.get(status(failure), "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _sentence(failure: Failure, request_id: str) -> str:
    if failure.code is Code.INTERNAL and request_id:
        return f"{failure.message} (request {request_id})"
    return failure.message
