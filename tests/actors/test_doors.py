"""The two kinds of doors."""

from __future__ import annotations

import json
from typing import Any

from actors.recipe.doors import SENTINEL, GatewayDoor, InboxDoor


class Stream:
    """Notes what is put."""

    stream_id = 7

    def __init__(self) -> None:
        self.puts: list[tuple[bytes, bool, int, float]] = []
        self.is_closed = False

    def put(self, item: bytes, *, is_last: bool = False, status: int = 200, retry_after_s: float = 0.0) -> None:
        self.puts.append((item, is_last, status, retry_after_s))

    def close(self) -> None:
        self.is_closed = True


def inbox(max_bytes: int = 1000) -> tuple[InboxDoor, list[tuple[InboxDoor, bytes]]]:
    outbox: list[tuple[InboxDoor, bytes]] = []
    return InboxDoor("_INBOX.a.1", outbox, lambda is_taken: None, max_bytes), outbox


def bodies(outbox: list[tuple[InboxDoor, bytes]]) -> list[Any]:
    return [json.loads(body) if body else SENTINEL for _, body in outbox]


def test_only_the_last_item_of_a_gateways_stream_is_last() -> None:
    stream = Stream()
    door = GatewayDoor("g0", stream)
    door.put([b"a", b"b"])
    door.put([b"c", b"d"], is_last=True, status=503, retry_after_s=1.5)
    news = [(body, False, 200, 0.0) for body in (b"a", b"b", b"c")]
    assert stream.puts == [*news, (b"d", True, 503, 1.5)]
    assert door.stream_id == 7
    door.close()
    assert stream.is_closed


def test_events_for_an_inbox_are_numbered() -> None:
    door, outbox = inbox()
    door.is_stream = True
    door.put([b'{"a":1}'])
    door.put([b'{"a":2}'], is_last=True)
    assert bodies(outbox) == [{"seq": 0, "a": 1}, {"seq": 1, "a": 2}, SENTINEL]


def test_a_body_for_an_inbox_is_not() -> None:
    door, outbox = inbox()
    door.put([b'{"a":1}'], is_last=True, status=400)
    assert bodies(outbox) == [{"a": 1}, SENTINEL]


def test_what_the_broker_would_not_take_becomes_an_error() -> None:
    door, outbox = inbox(max_bytes=300)
    door.is_stream = True
    door.put([b'{"a":"%b"}' % (b"x" * 300)], is_last=True)
    event, end = bodies(outbox)
    assert (event["seq"], event["error"]["code"], end) == (0, "too_large", SENTINEL)
    assert all(len(body) <= 300 for _, body in outbox)
