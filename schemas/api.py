"""The gateway's side of the public protocols: a call in, batches of events out."""

from __future__ import annotations

from enum import StrEnum

from schemas.bulk import Handle, Payload
from schemas.failure import Failure
from schemas.message import Message

PUBLIC = "public"
"""The tenant of everyone who is not known as another's."""


class Protocol(StrEnum):
    """The public protocols; also the last token of their subjects, `shoal.api.<protocol>`."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    CANCEL = "cancel"


class Call(Message, frozen=True):
    """Gateway → any recipe: one public request. Its events come back as `StreamBatch` under `stream_id`.

    `body` is the client's JSON, as it came; held by the gateway until the call is answered. `deadline_ns` is unix time,
    0 for none.
    """

    stream_id: int
    gateway: str
    protocol: Protocol
    body: Payload
    tenant: str = PUBLIC
    request_id: str = ""
    deadline_ns: int = 0


class Called(Message, frozen=True):
    """The call was taken. `is_stream`: events follow one by one; otherwise one body follows.

    `ignored` names the fields that were set and have no effect.
    """

    recipe: str
    request_id: str
    is_stream: bool
    ignored: list[str] = []


class Answer(Message, frozen=True):
    """A call that needs no generation, answered at once (count_tokens, models, cancel), or a refusal.

    `status` is an HTTP status; `body` is the protocol's own JSON.
    """

    status: int
    body: bytes
    failure: Failure | None = None


class StreamBatch(Message, frozen=True):
    """Items of many streams, struct of arrays: one message per step and destination.

    Item i belongs to `stream_ids[i]` and is number `seqs[i]` of it, from 0. `is_last` lists the items that are the
    terminal item of their stream. `statuses` holds (i, HTTP status) where it is not 200, and `waits` (i, seconds) where
    there is word of when to try again. `large` holds (i, handle) for items whose body travels beside the bus.
    """

    stream_ids: list[int]
    seqs: list[int]
    items: list[bytes]
    last: list[int] = []
    statuses: list[tuple[int, int]] = []
    large: list[tuple[int, Handle]] = []
    waits: list[tuple[int, float]] = []


class Probe(Message, frozen=True):
    """Gateway → the recipe of these streams, which are silent or lack items: finds what was lost or forgotten.

    Items from `from_seqs[i]` on, where there are any, are sent to stream i again; without it nothing is.
    """

    gateway: str
    stream_ids: list[int]
    from_seqs: list[int] = []


class Probed(Message, frozen=True):
    """The number of the next item of each stream asked for; -1 if it, or what it lacks, is not here any more."""

    next_seqs: list[int]
