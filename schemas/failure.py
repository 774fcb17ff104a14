"""Why a request did not finish: one code, one table."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from schemas.message import Message


class Code(StrEnum):
    """Every way a request can fail. `FAILURES` says what each means to a client."""

    BAD_REQUEST = "bad_request"
    UNSUPPORTED = "unsupported"
    CONTEXT_LENGTH = "context_length_exceeded"
    UNAUTHORIZED = "unauthorized"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    DUPLICATE_REQUEST = "duplicate_request"
    TOO_LARGE = "too_large"
    IMAGE_UNREACHABLE = "image_unreachable"
    RATE_LIMITED = "rate_limited"
    CANCELLED = "cancelled"
    CLIENT_TOO_SLOW = "client_too_slow"
    INTERNAL = "internal"
    TRANSFER_FAILED = "transfer_failed"
    VISION_ERROR = "vision_error"
    WORKER_LOST = "worker_lost"
    NO_REPLICA = "no_replica"
    NO_RESPONDERS = "no_responders"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE_EXCEEDED = "deadline_exceeded"


class Row(NamedTuple):
    """What one failure code means at the edge."""

    http_status: int
    is_retryable: bool
    what_to_do: str


FAILURES: dict[Code, Row] = {
    Code.BAD_REQUEST: Row(400, False, "correct the request; the message names the field"),
    Code.UNSUPPORTED: Row(400, False, "remove the field or content named in the message; this model cannot honour it"),
    Code.CONTEXT_LENGTH: Row(400, False, "shorten the prompt or lower max_tokens; the message gives both numbers"),
    Code.UNAUTHORIZED: Row(401, False, "send a key of SHOAL_API_KEYS or SHOAL_TENANTS as Bearer token or x-api-key"),
    Code.MODEL_NOT_FOUND: Row(404, False, "use a model listed by /v1/models"),
    Code.NOT_FOUND: Row(404, False, "check the path, or the id: the request may have ended already"),
    Code.DUPLICATE_REQUEST: Row(409, False, "choose another request id; a request with this one is still running"),
    Code.TOO_LARGE: Row(413, False, "send a smaller body; the message gives the limit"),
    Code.IMAGE_UNREACHABLE: Row(424, True, "retry, or send the image itself; its server did not give it in time"),
    Code.RATE_LIMITED: Row(429, True, "wait for the time given in retry-after"),
    Code.CANCELLED: Row(499, False, "nothing: the client asked for it, or went away"),
    Code.CLIENT_TOO_SLOW: Row(499, False, "read a stream as it comes, or ask for the whole answer without `stream`"),
    Code.INTERNAL: Row(500, True, "retry; if it comes back, report it with the x-request-id"),
    Code.TRANSFER_FAILED: Row(502, True, "retry: the state could not be moved to a decode replica"),
    Code.VISION_ERROR: Row(502, True, "retry: the image is good, but was lost or could not be encoded"),
    Code.WORKER_LOST: Row(503, True, "retry: the process that held the request ended; it is being restarted"),
    Code.NO_REPLICA: Row(503, True, "retry in a moment: no healthy replica; look at `shoal status`"),
    Code.NO_RESPONDERS: Row(503, True, "retry in a moment: the component is not running; look at `shoal status`"),
    Code.OVERLOADED: Row(503, True, "retry later, or add replicas"),
    Code.SHUTTING_DOWN: Row(503, True, "retry: the system is stopping"),
    Code.DEADLINE_EXCEEDED: Row(504, False, "send it with a later deadline, or a smaller request"),
}


class Failure(Message, frozen=True):
    """The answer of an ask that did not succeed.

    `message` says what was wrong, where, and what to do; it may be shown to the client. `field` names the request
    field at fault, if one was.
    """

    code: Code
    message: str
    field: str = ""
    retry_after_s: float = 0.0
