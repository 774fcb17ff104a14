"""The broker in memory: one process, no sockets, no threads, no wall clock; the same rules as NATS."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bus.bus import Delivery, check_headers, check_size, check_subject, check_subjects, fail
from bus.subjects import INTERNAL_INBOX, MAX_PUBLIC_BYTES
from schemas.failure import Code

log = logging.getLogger("shoal.bus")


class _Subscription:
    """One listener. `is_open` turns False once; deliveries on their way then are dropped."""

    __slots__ = ("is_open", "on_delivery", "queue", "subject", "wire")

    def __init__(self, wire: MemoryWire, subject: str, queue: str, on_delivery: Callable[[Delivery], None]) -> None:
        self.wire = wire
        self.subject = subject
        self.queue = queue
        self.on_delivery = on_delivery
        self.is_open = True

    def deliver(self, delivery: Delivery) -> None:
        if not self.is_open:
            return
        try:
            self.on_delivery(delivery)
        except (Exception, asyncio.CancelledError):
            log.exception("a listener on %s raised; it must only enqueue", self.subject)


@dataclass(slots=True)
class _Node:
    """One token of the subscription tree. Dicts keep insertion order, so matching is deterministic."""

    children: dict[str, _Node] = field(default_factory=dict)
    subscriptions: dict[_Subscription, None] = field(default_factory=dict)


class MemoryBroker:
    """Subjects and subscriptions of one process.

    Deliveries run by `loop.call_soon`, never inside `publish`, in the order they were published. Members of a queue
    group take turns. The same calls in the same order give the same deliveries.
    """

    def __init__(self, *, max_payload: int = MAX_PUBLIC_BYTES) -> None:
        self.max_payload = max_payload
        self.num_wires = 0
        self.away_s = 0.0
        self._root = _Node()
        self._turns: dict[str, int] = {}
        # Listeners must not inherit the publisher's trace context.
        self._context = contextvars.Context()

    def add(self, subscription: _Subscription) -> None:
        """Start delivering to it."""
        node = self._root
        for token in subscription.subject.split("."):
            node = node.children.setdefault(token, _Node())
        node.subscriptions[subscription] = None

    def remove(self, subscription: _Subscription) -> None:
        """Choose it no more. Idempotent."""
        path = [self._root]
        tokens = subscription.subject.split(".")
        for token in tokens:
            node = path[-1].children.get(token)
            if node is None:
                return
            path.append(node)
        path[-1].subscriptions.pop(subscription, None)
        for token, parent, node in zip(reversed(tokens), reversed(path[:-1]), reversed(path[1:]), strict=True):
            if node.children or node.subscriptions:
                break
            del parent.children[token]

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        """Schedule the delivery to all who listen now, or the broker's no-responders answer to `source`."""
        call_soon = asyncio.get_running_loop().call_soon
        chosen = self._choose(self._match(delivery.subject))
        if not chosen and delivery.reply:
            delivery = Delivery(delivery.reply, b"", "", None, is_missing=True)
            # NATS tells only the connection that published, and only if it listens on the reply.
            chosen = [s for s in self._match(delivery.subject) if s.wire is source][:1]
        for subscription in chosen:
            call_soon(subscription.deliver, delivery, context=self._context)

    def _match(self, subject: str) -> list[_Subscription]:
        found: list[_Subscription] = []
        level = [self._root]
        for token in subject.split("."):
            below: list[_Node] = []
            for node in level:
                children = node.children
                if (rest := children.get(">")) is not None:
                    found.extend(rest.subscriptions)
                if (exact := children.get(token)) is not None:
                    below.append(exact)
                if (star := children.get("*")) is not None:
                    below.append(star)
            level = below
        for node in level:
            found.extend(node.subscriptions)
        return found

    def _choose(self, matching: list[_Subscription]) -> list[_Subscription]:
        """All without a queue, and one of each queue group, in turn."""
        groups: dict[str, list[_Subscription]] = {}
        chosen: list[_Subscription] = []
        for subscription in matching:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                chosen.append(subscription)
        for queue, members in groups.items():
            turn = self._turns.get(queue, 0)
            self._turns[queue] = turn + 1
            chosen.append(members[turn % len(members)])
        return chosen


class MemoryWire:
    """One connection to a `MemoryBroker`; see `bus.bus.Wire`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        broker.num_wires += 1
        self.inbox = f"{INTERNAL_INBOX}.{broker.num_wires}"
        self._subscriptions: dict[_Subscription, None] = {}
        self._is_closed = False
        self._is_cut = False

    @property
    def max_payload(self) -> int:
        """The largest body plus headers, in bytes."""
        return self._broker.max_payload

    @property
    def away_s(self) -> float:
        """See `Wire.away_s`: 0, unless whoever made the broker says otherwise."""
        return self._broker.away_s

    async def publish(
        self, subject: str, body: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """See `Wire.publish`."""
        check_subjects(subject, reply)
        if headers:
            check_headers(headers)
        check_size(subject, body, headers, self.max_payload)
        if self._is_cut:
            return
        if self._is_closed:
            raise fail(Code.SHUTTING_DOWN, f"the connection is closed; nothing was sent to {subject}")
        self._broker.publish(self, Delivery(subject, body, reply, dict(headers) if headers else None))

    async def subscribe(
        self, subject: str, on_delivery: Callable[[Delivery], None], *, queue: str = ""
    ) -> Callable[[], Any]:
        """See `Wire.subscribe`."""
        check_subject(subject)
        subscription = _Subscription(self, subject, queue, on_delivery)

        async def unsubscribe() -> None:
            if subscription in self._subscriptions:
                del self._subscriptions[subscription]
                self._broker.remove(subscription)
                await asyncio.sleep(0)  # what is on its way arrives
                subscription.is_open = False

        if self._is_cut:
            return unsubscribe
        if self._is_closed:
            raise fail(Code.SHUTTING_DOWN, f"the connection is closed; cannot listen on {subject}")
        self._subscriptions[subscription] = None
        self._broker.add(subscription)
        return unsubscribe

    async def flush(self) -> None:
        """See `Wire.flush`."""
        await asyncio.sleep(0)

    async def close(self) -> None:
        """See `Wire.close`."""
        self._is_closed = True
        self._end_subscriptions()

    def cut(self) -> None:
        """Die without a word: from now on nothing this wire publishes or subscribes reaches anyone, and it hears
        nothing. No call fails. What was published before is still delivered, as bytes in flight are.
        """
        self._is_cut = True
        self._end_subscriptions()

    def _end_subscriptions(self) -> None:
        for subscription in self._subscriptions:
            subscription.is_open = False
            self._broker.remove(subscription)
        self._subscriptions.clear()
