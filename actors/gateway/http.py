"""What the HTTP door knows of the protocols: their paths, how events are framed, how errors look."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from actors.rules.errors import error_body
from schemas.api import Answer, Protocol
from schemas.failure import FAILURES, Code, Failure

POSTS = {
    "/v1/chat/completions": Protocol.CHAT_COMPLETIONS,
    "/v1/responses": Protocol.RESPONSES,
    "/v1/messages": Protocol.MESSAGES,
    "/v1/messages/count_tokens": Protocol.COUNT_TOKENS,
}
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"

DONE = b"data: [DONE]\n\n"
"""Ends a stream of Chat Completions; the other protocols end with an event of their own."""

_RETRYABLE = {row.http_status: row.is_retryable for row in FAILURES.values()}
TIMEOUT_HEADER = "shoal-timeout-s"
_TIMEOUT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP response."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Request:
    """A request line with its headers (lower-case names), and the unix time of its arrival. `request_id` is ours;
    `label` is what the client calls it."""

    method: str
    path: str
    headers: dict[str, str]
    request_id: str
    arrived_ns: int = 0

    def deadline_ns(self) -> int | Failure:
        """The unix time by which the client wants its answer, 0 for no such wish; why it cannot be told."""
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return 0
        timeout_ns = int(float(given) * 1e9) if _TIMEOUT.fullmatch(given) else 0
        if timeout_ns <= 0:
            why = f"{TIMEOUT_HEADER} must be a positive decimal number of seconds, such as 30 or 0.5"
            return Failure(code=Code.BAD_REQUEST, message=why, field=TIMEOUT_HEADER)
        return self.arrived_ns + timeout_ns

    @property
    def label(self) -> str:
        """The client's x-request-id if it is sane, else our id."""
        given = self.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else self.request_id

    @property
    def protocol(self) -> Protocol:
        """Whose errors this client understands; OpenAI's unless it is clearly Anthropic's."""
        if self.path in POSTS:
            return POSTS[self.path]
        is_anthropic = self.path.startswith("/v1/messages") or "anthropic-version" in self.headers
        return Protocol.MESSAGES if is_anthropic else Protocol.CHAT_COMPLETIONS

    def reply(self, http_status: int, body: bytes, *, retry_after_s: float = 0.0) -> Reply:
        """A JSON reply with the headers that every reply carries."""
        return Reply(http_status, body, self._headers(http_status, b"application/json", retry_after_s))

    def refusal(self, failure: Failure) -> Reply:
        """A failure, in the protocol's own words."""
        row = FAILURES[failure.code]
        body = error_body(self.protocol, failure, self.label)
        return self.reply(row.http_status, body, retry_after_s=failure.retry_after_s)

    def answered(self, answer: Answer) -> Reply:
        """A recipe's answer; its failures in the words of this client, not of the subject it was asked on."""
        return self.refusal(answer.failure) if answer.failure else self.reply(answer.status, answer.body)

    def stream_headers(self, ignored: Sequence[str]) -> Headers:
        """The headers of an event stream."""
        headers = self._headers(200, b"text/event-stream; charset=utf-8", 0.0)
        return [*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *ignored_header(ignored)]

    def _headers(self, http_status: int, content_type: bytes, retry_after_s: float) -> Headers:
        headers = [(b"content-type", content_type), (b"x-request-id", self.label.encode())]
        if self.protocol in (Protocol.MESSAGES, Protocol.COUNT_TOKENS):
            headers.append((b"request-id", self.label.encode()))
        if http_status >= 400:
            # Both SDKs follow this rather than guess from the status.
            headers.append((b"x-should-retry", b"true" if _RETRYABLE.get(http_status) else b"false"))
            retry_after_s = retry_after_s or (1.0 if _RETRYABLE.get(http_status) else 0.0)
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % math.ceil(retry_after_s)))
        return headers


def ignored_header(ignored: Sequence[str]) -> Headers:
    """The request fields that were set and have no effect, for the client to see."""
    return [(b"x-shoal-ignored", ", ".join(ignored).encode())] if ignored else []


def not_found(request: Request) -> Reply:
    """A path that is not served, or not with this method."""
    known = request.path in POSTS or request.path in (HEALTH_PATH, MODELS_PATH)
    if not known:
        failure = Failure(code=Code.NOT_FOUND, message=f"no such path: {request.method} {request.path[:200]}")
        return request.refusal(failure)
    allowed = "POST" if request.path in POSTS else "GET"
    failure = Failure(code=Code.NOT_FOUND, message=f"{request.path} takes {allowed}, not {request.method}")
    reply = request.reply(405, error_body(request.protocol, failure, request.label))
    reply.headers.append((b"allow", allowed.encode()))
    return reply


def health(is_draining: bool) -> tuple[int, bytes]:
    """Status and body of the health check."""
    return (503, b'{"status":"draining"}') if is_draining else (200, b'{"status":"ok"}')


def models_body(path: str) -> bytes:
    """The body of a models call: which one the path names, or empty for all."""
    name = path.removeprefix(MODELS_PATH).strip("/")
    return orjson.dumps({"model": name}) if name else b""


def frame(protocol: Protocol, items: Sequence[bytes]) -> bytes:
    """Events as server-sent events. Those of Responses and Messages are named by their type, their first field."""
    if protocol is Protocol.CHAT_COMPLETIONS:
        return b"data: " + b"\n\ndata: ".join(items) + b"\n\n"
    return b"".join([b"event: %b\ndata: %b\n\n" % (item[9 : item.index(b'"', 9)], item) for item in items])


def block(protocol: Protocol, items: Sequence[bytes], *, is_done: bool) -> bytes:
    """What a stream sends for these events; for none, a sign of life. `is_done`: they end it, and well."""
    sent = frame(protocol, items) if items else _keep_alive(protocol)
    return sent + DONE if is_done and protocol is Protocol.CHAT_COMPLETIONS else sent


def _keep_alive(protocol: Protocol) -> bytes:
    """What an idle stream carries, so that nothing on the way takes it for dead."""
    return frame(protocol, [b'{"type":"ping"}']) if protocol is Protocol.MESSAGES else b": keep-alive\n\n"
