"""The actor contract: one mailbox, ordered and bounded; start → ready → receive… → drain → stop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bus.bus import DEADLINE_HEADER, Bus, BusError, Delivery, decoder
from bus.metrics import record_load
from bus.subjects import LOAD, Address, Subject, drain, ping, report_load
from schemas.failure import Code, Failure
from schemas.liveness import Drain, Ping, Pong
from schemas.message import Message, Role
from schemas.routing import LoadReported, ReportLoad

log = logging.getLogger("shoal.actor")
M = TypeVar("M", bound=Message)

HEARTBEAT_S = 2.0
"""How often a load report is sent when nothing changes; three missed ones mean gone."""

RESERVE = 8
"""One in so many places of a mailbox is for asks, which have a deadline: data cannot keep out a ping or a cancel."""

GRACE_S = 60.0
"""How long what is here goes on when an actor leaves, unless it is told otherwise."""

LAST_S = 12.0
"""Who sees off what is left after the grace does so within this time."""

LOOK_S = 0.02

_propagator = TraceContextTextMapPropagator()


class Envelope:
    """A message with the way back. An ask is answered exactly once; the actor sees to it that none is forgotten."""

    __slots__ = ("_bus", "_pending", "headers", "message", "reply_to")

    def __init__(self, message: Any, delivery: Delivery, bus: Bus, pending: dict[Envelope, None]) -> None:
        self.message = message
        self.reply_to = delivery.reply
        self.headers = delivery.headers
        self._bus = bus
        self._pending = pending

    @property
    def context(self) -> Context:
        """The trace context of the sender (empty if there was none)."""
        return _propagator.extract(self.headers or {})

    async def answer(self, message: Message) -> None:
        """Answer the ask. A second answer is ignored, as is one to a tell."""
        if self in self._pending:
            del self._pending[self]
            await self._bus.answer(self.reply_to, message)


Handler = Callable[[Any, Envelope], Awaitable[Message | None]]


class Actor:
    """One mailbox, one owner of its state. Subclass, set `role`, and say in `handlers()` what it listens to.

    - A handler is called with (message, envelope), one at a time, in order of arrival. What it returns answers an
      ask; with None the handler answers later through `envelope.answer`. A `BusError` it raises is the answer; any
      other exception is a crash of the actor, which its supervisor sees.
    - `flush()` runs whenever the mailbox has just been emptied: send there what handlers gathered, so that a burst
      becomes one message. `wake()` asks for it from a task or timer.
    - `spawn()` starts work that outlives a handler; the actor owns it, and its crash is the actor's crash.
    - A full mailbox answers asks with `overloaded`; tells are counted in `num_dropped` and repaired by their sequence
      numbers. It is full for them before it is for asks.
    - `drain()` stops new work at the door (what that means is the subclass's), and once it `is_drained` nothing is lost
      with it; `leave()` waits for that, for the grace and `last_s`.
    - `stop()` is idempotent, ends spawned work, calls `on_stop()`, and answers every pending ask with `shutting_down`.
    """

    role: ClassVar[Role]
    mailbox_limit: ClassVar[int] = 8192
    last_s: ClassVar[float] = 0.0

    def __init__(self, id: str, bus: Bus) -> None:
        self.id = id
        self.bus = bus
        self.incarnation = f"{bus.seams.random.getrandbits(32):08x}"
        self.num_dropped = 0
        self.is_draining = False
        self._mailbox: deque[tuple[Handler, Envelope]] = deque()
        self._wake = asyncio.Event()
        # Dicts, not sets: their order is the same in every run.
        self._pending: dict[Envelope, None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._unsubscribes: list[Callable[[], Any]] = []
        self._crash: BaseException | None = None
        self._report_seq = 0
        self._is_ready = False
        self._has_left = False
        self._is_stopped = False

    # What a subclass says

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        """Subjects of this actor's role, each with its handler."""
        raise NotImplementedError

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        """Events of others this actor listens to."""
        return {}

    async def on_start(self) -> None:
        """Called once, with subscriptions in place, before the actor is ready."""

    async def on_stop(self) -> None:
        """Called once, before pending asks are answered. Also after a failed start: must be null-safe."""

    async def flush(self) -> None:
        """The mailbox is empty: send what was gathered."""

    def load(self) -> LoadReported:
        """How loaded this actor is. Subclasses fill in what they know."""
        return LoadReported(
            role=self.role,
            id=self.id,
            incarnation=self.incarnation,
            seq=self._report_seq,
            pid=self.bus.seams.pid,
            host=self.bus.seams.host,
            is_accepting=not self.is_draining,
        )

    @property
    def is_drained(self) -> bool:
        """Of one that drains: nothing is here any more that others would miss. By its load: nothing runs or waits."""
        load = self.load()
        return not load.num_running and not load.num_waiting

    # What a supervisor calls

    async def run(self, ready: Callable[[], None]) -> None:
        """Live until cancelled or crashed, or told to leave. `ready` is called once subscriptions are in place and
        `on_start` is done."""
        try:
            await self._listen()
            await self.on_start()
            await self.report_load()
            self.spawn(self._heartbeat())
            self._is_ready = True
            ready()
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._mailbox:
                    await self._receive(*self._mailbox.popleft())
                    if self._crash is not None:
                        break
                if self._crash is not None:
                    raise self._crash
                await self.flush()
                if self._has_left:
                    return
        finally:
            await self.stop()

    async def drain(self, grace_s: float = GRACE_S) -> None:
        """Take no new work; go on with what is here for so long, then see it off. Idempotent."""
        self.is_draining = True
        await self.report_load()

    async def leave(self, grace_s: float) -> None:
        """Drain, and return once nothing is left here, or when there is no more time for it."""
        end_s = self.now_s() + grace_s + self.last_s
        await self.drain(grace_s)
        while not self.is_drained:
            if self.now_s() >= end_s:
                log.warning("%s %s leaves with requests that nobody took", self.role, self.id)
                return
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await asyncio.gather(*(unsubscribe() for unsubscribe in self._unsubscribes))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.on_stop()
        finally:
            failure = Failure(code=Code.SHUTTING_DOWN, message=f"{self.role} {self.id} has stopped")
            for envelope in list(self._pending):
                try:
                    await envelope.answer(failure)
                except BusError as error:
                    log.info("%s %s: an asker was not told of the stop: %s", self.role, self.id, error)

    # What a subclass uses

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine that this actor owns."""
        task = asyncio.create_task(work, name=f"{self.role}/{self.id}")
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)
        return task

    def now_s(self) -> float:
        """The loop's clock, for cores that take the time as an argument. It stands still while the broker is away: for
        so long nobody is heard of, and nobody is gone for that."""
        return asyncio.get_running_loop().time() - self.bus.wire.away_s

    def wake(self) -> None:
        """Ask for a `flush()` soon."""
        self._wake.set()

    async def report_load(self) -> None:
        """Publish how loaded this actor is, now."""
        self._report_seq += 1
        report = self.load()
        record_load(report)
        await self.bus.tell(LOAD.at(self.role), report)

    async def report_changes(self, changed: asyncio.Event, pause_s: float) -> None:
        """Publish it whenever `changed` is set, at once, and many changes together: one in `pause_s`. To be spawned."""
        while True:
            await changed.wait()
            changed.clear()
            await self.report_load()
            await asyncio.sleep(pause_s)

    # Inside

    async def _listen(self) -> None:
        handlers = {subject.verb: (subject, handler) for subject, handler in self.handlers().items()}
        handlers["ping"] = (ping(self.role), self._on_ping)
        handlers["report"] = (report_load(self.role), self._on_report_load)
        handlers["drain"] = (drain(self.role), self._on_drain)

        def on_delivery(delivery: Delivery) -> None:
            verb = delivery.subject.rpartition(".")[2]
            if (known := handlers.get(verb)) is not None:
                self._enqueue(*known, delivery)

        prefix = f"shoal.{self.role}"
        self._unsubscribes.append(await self.bus.wire.subscribe(f"{prefix}.{self.id}.*", on_delivery))
        self._unsubscribes.append(await self.bus.wire.subscribe(f"{prefix}.any.*", on_delivery, queue=self.role))
        self._unsubscribes.append(await self.bus.wire.subscribe(f"{prefix}.all.*", on_delivery))
        for address, handler in self.events().items():
            await self._listen_to_event(address, handler)
        await self.bus.wire.flush()

    async def _listen_to_event(self, address: Address[Any, Any], handler: Handler) -> None:
        def on_delivery(delivery: Delivery) -> None:
            self._enqueue(address.subject, handler, delivery)

        self._unsubscribes.append(await self.bus.wire.subscribe(address.name, on_delivery))

    def _enqueue(self, subject: Subject[Any, Any], handler: Handler, delivery: Delivery) -> None:
        try:
            message = decoder(subject.message).decode(delivery.body)
        except msgspec.MsgspecError as error:
            log.warning("%s %s: undecodable %s: %s", self.role, self.id, delivery.subject, error)
            failure = Failure(code=Code.BAD_REQUEST, message=f"undecodable {subject.message.__name__}: {error}")
            self._refuse(delivery, failure)
            return
        if subject.is_early and not self._is_ready:  # the mailbox waits: a start may take longer than the others do
            self.spawn(self._receive(handler, self._envelope(message, delivery, subject.reply is not None)))
        else:
            self.enqueue(handler, message, delivery, is_ask=subject.reply is not None)

    def enqueue(self, handler: Handler, message: Any, delivery: Delivery, *, is_ask: bool) -> None:
        """Put a message in the mailbox, for its handler. For subscriptions a subclass makes itself."""
        deadline = (delivery.headers or {}).get(DEADLINE_HEADER, "")
        limit = self.mailbox_limit if deadline else self.mailbox_limit - self.mailbox_limit // RESERVE
        if len(self._mailbox) >= limit:
            self.num_dropped += 1
            self._refuse(delivery, Failure(code=Code.OVERLOADED, message=f"{self.role} {self.id}: mailbox is full"))
            return
        if deadline.isdecimal() and int(deadline) < self.bus.seams.clock_ns():
            return  # the asker has given up already
        self._mailbox.append((handler, self._envelope(message, delivery, is_ask)))
        self._wake.set()

    def _envelope(self, message: Any, delivery: Delivery, is_ask: bool) -> Envelope:
        envelope = Envelope(message, delivery, self.bus, self._pending)
        if is_ask and delivery.reply:
            self._pending[envelope] = None
        return envelope

    def _refuse(self, delivery: Delivery, failure: Failure) -> None:
        if delivery.reply:
            self.spawn(self.bus.answer(delivery.reply, failure))

    async def _receive(self, handler: Handler, envelope: Envelope) -> None:
        try:
            reply = await handler(envelope.message, envelope)
        except BusError as error:
            if not envelope.reply_to:
                log.warning("%s %s: %s: %s", self.role, self.id, type(envelope.message).__name__, error)
            reply = error.failure
        if reply is not None:
            await envelope.answer(reply)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.report_load()
            self.wake()  # what waits behind a window whose receipts were lost goes out by time

    async def _on_ping(self, message: Ping, envelope: Envelope) -> Pong:
        return self._pong()

    def _pong(self) -> Pong:
        return Pong(role=self.role, id=self.id, incarnation=self.incarnation, num_queued=len(self._mailbox))

    async def _on_report_load(self, message: ReportLoad, envelope: Envelope) -> None:
        await self.report_load()

    async def _on_drain(self, message: Drain, envelope: Envelope) -> LoadReported | None:
        if message.incarnation not in ("", self.incarnation):
            return self.load()  # the one that was meant has left already
        self.spawn(self._leave(message.grace_s, envelope))
        return None

    async def _leave(self, grace_s: float, envelope: Envelope) -> None:
        await self.leave(grace_s)
        await envelope.answer(self.load())
        self._has_left = True
        self.wake()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            error = task.exception()
        elif task.cancelling() == 0:
            error = RuntimeError(f"{task.get_name()}: a task ended by a cancellation nobody asked for")
        else:
            return
        if error is not None and self._crash is None:
            self._crash = error
            self._wake.set()
