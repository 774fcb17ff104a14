"""An actor that serves strangers too: NATS clients, who publish on public subjects and are answered on their inbox."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from bus.actor import GRACE_S, Actor
from bus.bus import Bus, Delivery, OnFate
from bus.subjects import API_PREFIX, api, is_inbox, read_api
from schemas import api as schema
from schemas.failure import Code, Failure

log = logging.getLogger("shoal.bus")


TAKEN_PER_S = 2000
"""More messages of clients than one process can serve."""

ANSWERED_PER_S = 4000
"""What is over the first limit is refused, and what is over this one not even that: to answer a flood is to drown in
it, and with us all who share the process. Dropped messages are counted and logged."""


class Sluice:
    """How much of what strangers send is looked at, second by second. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._second = 0
        self._count = 0

    def admit(self, now_s: float) -> Admission:
        """What to do with one more message."""
        if int(now_s) != self._second:
            if self._count > ANSWERED_PER_S:
                log.warning("dropped %d of the last second's messages on public subjects", self._count - ANSWERED_PER_S)
            self._second, self._count = int(now_s), 0
        self._count += 1
        if self._count <= TAKEN_PER_S:
            return Admission.TAKE
        if self._count <= ANSWERED_PER_S:
            return Admission.REFUSE
        self.num_dropped += 1
        return Admission.DROP


class Admission(Enum):
    """TAKE it, REFUSE it with an answer, or DROP it."""

    TAKE = 1
    REFUSE = 2
    DROP = 3


class Inbox(Protocol):
    """Where a client listens. `on_fate` hears (False) when it does not any more."""

    inbox: str
    on_fate: OnFate


class PublicActor(Actor):
    """Subclass, and call `listen_to_clients` in `on_start`.

    `outbox` gathers (inbox, message) for clients, in order; `flush` sends it. An empty message is the last of a reply.
    Draining stops listening to clients: another of the role gets the next request.
    """

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.outbox: list[tuple[Inbox, bytes]] = []
        self._public: list[Callable[[], Any]] = []
        self._sluice = Sluice()

    def on_client(self, protocol: schema.Protocol, tenant: str, delivery: Delivery) -> None:
        """A client's message, by the tenant whose subject it is. Only enqueue it, with `is_ask=False`."""
        raise NotImplementedError

    def refuse_client(self, protocol: schema.Protocol, delivery: Delivery, failure: Failure) -> None:
        """A client's message that is not enqueued: put the answer in the outbox."""
        raise NotImplementedError

    async def listen_to_clients(self) -> None:
        """Subscribe to every public subject, and those of all tenants; the actors of a role share what comes."""
        for protocol in schema.Protocol:
            for subject in (api(protocol), api(protocol, "*")):
                on_delivery = functools.partial(self._on_client, protocol)
                self._public.append(await self.bus.wire.subscribe(subject, on_delivery, queue=self.role))
        self._unsubscribes.extend(self._public)

    async def drain(self, grace_s: float = GRACE_S) -> None:
        await asyncio.gather(*(unsubscribe() for unsubscribe in self._public))
        await super().drain(grace_s)

    async def flush(self) -> None:
        messages, self.outbox[:] = list(self.outbox), []
        for inbox, body in messages:
            await self.bus.publish(inbox.inbox, body, on_fate=inbox.on_fate)
            if not body:
                self.bus.forget(inbox.inbox, inbox.on_fate)

    def _on_client(self, protocol: schema.Protocol, delivery: Delivery) -> None:
        admission = self._sluice.admit(asyncio.get_running_loop().time())
        tenant, _ = read_api(delivery.subject)
        # A broker checks where clients publish, not where they let us answer: only an inbox is a place for that, and
        # a tenant's only for that tenant.
        if admission is Admission.DROP or not is_inbox(delivery.reply, tenant):
            return
        if admission is Admission.TAKE:
            self.on_client(protocol, tenant or schema.PUBLIC, delivery)
        else:
            self.refuse_client(protocol, delivery, Failure(code=Code.OVERLOADED, message="too many requests a second"))
            self.wake()

    def _refuse(self, delivery: Delivery, failure: Failure) -> None:
        if delivery.subject.startswith(API_PREFIX):
            self.refuse_client(read_api(delivery.subject)[1], delivery, failure)
            self.wake()
        else:
            super()._refuse(delivery, failure)
