"""The door for NATS clients: what their headers say, and which request an id means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol as Interface

import orjson

from actors.recipe.fields import Refusal
from actors.recipe.normalise import parse
from actors.recipe.protocol import request_id_of
from actors.rules.tenants import is_id_of, new_id
from schemas.api import Call, Protocol
from schemas.bulk import Payload
from schemas.failure import Code

_TRACE_HEADERS = ("traceparent", "tracestate")


class Message(Interface):
    """What comes from a client (a delivery of bus/bus.py)."""

    @property
    def body(self) -> bytes: ...
    @property
    def reply(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...


def read_call(protocol: Protocol, tenant: str, message: Message, fresh_id: str) -> tuple[Call, dict[str, str]]:
    """A client's message as a call, and its trace headers. Header names in any case; nonsense counts as absent.

    `x-request-id` is the client's own name for the request, from which its id is derived; else it gets `fresh_id`.
    """
    lower = {name.lower(): value for name, value in (message.headers or {}).items()}
    label, deadline = lower.get("x-request-id", "")[:256], lower.get("shoal-deadline-ns", "")
    call = Call(
        stream_id=0,
        gateway="",
        protocol=protocol,
        body=Payload(inline=message.body),
        tenant=tenant,
        request_id=derived_id(tenant, client_of(message.reply), label) if label else fresh_id,
        deadline_ns=int(deadline) if deadline.isdecimal() and len(deadline) < 20 else 0,
    )
    return call, {name: lower[name] for name in _TRACE_HEADERS if name in lower}


def client_of(inbox: str) -> str:
    """Whose an inbox is: the prefix that all inboxes of one client share, and no others know.

    The inboxes of tenants share one: there the tenant is the client.
    """
    return ".".join(inbox.split(".")[:2])


def derived_id(tenant: str, client: str, label: str) -> str:
    """The request id of a client's label: the same at every recipe, so that any of them can cancel by it."""
    digest = hashlib.sha256(f"{client}\0{label}".encode()).digest()
    return new_id(tenant, int.from_bytes(digest[:16], "big"))


def read_cancel(body: bytes, tenant: str, client: str) -> tuple[str, list[str]]:
    """The id in a cancel body, and the request ids it may mean: its own hex digits first, then as a label.

    Only the tenant's own. Raises Refusal.
    """
    id = parse(body).get("id")
    if not isinstance(id, str) or not id:
        raise Refusal(Code.BAD_REQUEST, "id is missing: give a response id, a request id or an x-request-id", "id")
    bare = request_id_of(id)
    return id, [*([bare] if is_id_of(tenant, bare) else []), derived_id(tenant, client, id)]


def cancel_body(id: str, was_running: bool) -> bytes:
    """The answer to a cancel. Cancelling what has ended is no error."""
    return orjson.dumps({"id": id, "object": "cancel", "cancelled": was_running})
