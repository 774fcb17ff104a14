"""A broker that loses, doubles and delays messages, and wires that are cut off or whose process stands still."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from bus.broker import SETTLE_S
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Delivery
from bus.frame import failed
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import INTERNAL_INBOX
from run.simulate.chaos.script import Kind, Messages
from run.simulator import RecordingBroker
from schemas.bulk import Handle

VERBS: dict[Kind, frozenset[str]] = {
    "tokens": frozenset({"tokens"}),
    "asks": frozenset({
            *("submit", "cancel", "claim", "resend", "route", "dispatch", "handover", "shortened"),
            *("resolve", "encode", "admit", "used"),
        }),
    "reports": frozenset({"load", "report"}),
    "frees": frozenset({"release"}),
    "cache": frozenset(
        {"describe", "find", "kept", "store", "dump", "drop", "adopt", "room", "stored", "dropped", "touched", "failed"}
    ),
    "exits": frozenset({"exited"}),
    "answers": frozenset(),
}
"""The last words of the subjects of each kind; answers, and receipts, go to inboxes."""

LATE_S = 8.0
OVERTAKEN_S = 0.2
RECONNECT_S = 2.0
"""At most."""

TRANSFER_S = 0.002
"""What a pull takes: long enough for something to come in between."""

Hears = Callable[[MemoryWire, Delivery], None]


class ChaosWire(MemoryWire):
    """`num_apart`, `num_still`: how many faults cut it off, or have its process stand, at the moment."""

    def __init__(self, broker: ChaosBroker, name: str) -> None:
        super().__init__(broker)
        self.name = name
        self.num_apart = self.num_still = 0
        self.is_away = False
        self.settled_s = 0.0
        self.unsent: list[Delivery] = []
        self._held: list[tuple[Callable[[Delivery], None], Delivery]] = []

    @property
    def is_cut(self) -> bool:
        """Its process is dead."""
        return self._is_cut

    async def subscribe(
        self, subject: str, on_delivery: Callable[[Delivery], None], *, queue: str = ""
    ) -> Callable[[], Any]:
        """See `Wire.subscribe`."""
        return await super().subscribe(subject, lambda delivery: self._receive(on_delivery, delivery), queue=queue)

    def _receive(self, on_delivery: Callable[[Delivery], None], delivery: Delivery) -> None:
        if self.num_apart or (delivery.is_missing and asyncio.get_running_loop().time() < self.settled_s):
            return
        if self.num_still:
            self._held.append((on_delivery, delivery))
        else:
            on_delivery(delivery)

    def hear_held(self) -> None:
        """Its process goes on, and finds what came meanwhile."""
        held, self._held = self._held, []
        for on_delivery, delivery in [] if self._is_cut else held:
            on_delivery(delivery)

    def leave(self) -> None:
        """Its connection is lost."""
        self.is_away, self.settled_s = True, float("inf")
        for subscription in self._subscriptions:
            self._broker.remove(subscription)

    def come_back(self) -> None:
        """It is connected again: listens on what it listened on, and sends what waited."""
        self.is_away, self.settled_s = False, asyncio.get_running_loop().time() + SETTLE_S
        for subscription in self._subscriptions:
            self._broker.add(subscription)
        unsent, self.unsent = self.unsent, []
        for delivery in [] if self._is_cut else unsent:
            self._broker.publish(self, delivery)


class ChaosBroker(RecordingBroker):
    """Records all that is published, and does to it what the faults at work say."""

    def __init__(self, hears: Hears) -> None:
        super().__init__()
        self._hears = hears
        self._rules: dict[Messages, random.Random] = {}
        self.wires: list[ChaosWire] = []
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.num_doubled = 0
        """What came twice, or late: who hears it may do it again."""

    def begin(self, rule: Messages) -> None:
        """From now on."""
        self._rules[rule] = random.Random(rule.seed)

    def end(self, rule: Messages) -> None:
        """No longer."""
        self._rules.pop(rule, None)

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        assert isinstance(source, ChaosWire)
        if source.is_away:
            source.unsent.append(delivery)
            return
        self._hears(source, delivery)
        if source.num_apart:
            return
        if not self._rules:
            super().publish(source, delivery)
            return
        self.record(delivery)
        delays = [0.0]
        for rule, chance in self._rules.items():
            if is_hit(delivery.subject, rule) and chance.randrange(rule.one_in) == 0:
                delays = _fated(delays, rule.fate, chance)
        self.num_doubled += delays not in ([], [0.0])
        loop = asyncio.get_running_loop()
        for delay_s in delays:
            if delay_s:
                loop.call_later(delay_s, MemoryBroker.publish, self, source, delivery, context=self._context)
            else:
                MemoryBroker.publish(self, source, delivery)

    def go_down(self) -> None:
        """Nobody is connected any more."""
        self.is_up.clear()
        for wire in self.wires:
            wire.leave()

    def come_up(self, chance: random.Random) -> None:
        """All come back, each after its own time; whose process stands, or is cut off, when it can."""
        self.is_up.set()
        for wire in self.wires:
            self._reconnect_later(wire, chance)

    def _reconnect_later(self, wire: ChaosWire, chance: random.Random) -> None:
        asyncio.get_running_loop().call_later(
            chance.uniform(0.0, RECONNECT_S), self._reconnect, wire, chance, context=self._context
        )

    def _reconnect(self, wire: ChaosWire, chance: random.Random) -> None:
        if wire.is_cut or not wire.is_away or not self.is_up.is_set():
            return
        if wire.num_still or wire.num_apart:
            self._reconnect_later(wire, chance)
        else:
            wire.come_back()


class ChaosBulk(MemoryBulk):
    """Pulls take time, and wait where either side is cut off or the other one stands still."""

    def __init__(self, hub: MemoryHub, wire: ChaosWire) -> None:
        super().__init__(hub)
        self.wire = wire

    async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
        """See `Bulk.pull`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        await asyncio.sleep(TRANSFER_S)
        owner = self._hub.bulks.get(handle.address)
        while isinstance(owner, ChaosBulk) and (owner.wire.num_still or owner.wire.num_apart or self.wire.num_apart):
            if loop.time() >= end_s or self._is_cut:
                raise failed(handle, f"not done within {timeout_s:g} s")
            await asyncio.sleep(0.25)
        return await super().pull(handle, timeout_s=timeout_s)


def is_of(subject: str, kind: Kind) -> bool:
    """Whether messages to this subject are of a kind."""
    if subject.startswith(INTERNAL_INBOX):
        return kind == "answers"
    return subject.rpartition(".")[2] in VERBS[kind]


def is_hit(subject: str, rule: Messages) -> bool:
    """As above. A request that is submitted twice is asked for twice: no bus does that, and clients would know."""
    return is_of(subject, rule.kind) and not (rule.fate == "twice" and subject.endswith(".submit"))


def _fated(delays: list[float], fate: str, chance: random.Random) -> list[float]:
    """When it comes, in seconds from now: not at all, or more than once."""
    match fate:
        case "lost":
            return []
        case "twice":
            return [*delays, *(delay_s + chance.choice([0.0, chance.uniform(0.0, LATE_S)]) for delay_s in delays)]
        case "late":
            return [delay_s + chance.uniform(0.0, LATE_S) for delay_s in delays]
    return [delay_s + chance.uniform(0.0, OVERTAKEN_S) for delay_s in delays]
