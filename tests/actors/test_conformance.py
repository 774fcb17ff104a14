"""The actor contract, held by every actor of the core."""

from __future__ import annotations

from actors.balancers.actor import DecodeBalancer, PrefillBalancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.prefill.actor import Prefill
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus
from kernels.timed import TimedEngine
from tests.actors.core import VOCABULARY, info
from tests.bus.conformance import ActorConformance


class TestEntrypoint(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Entrypoint("e0", bus, MemoryBulk(MemoryHub()))


class TestPrefillBalancer(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return PrefillBalancer("pb0", bus)


class TestDecodeBalancer(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return DecodeBalancer("db0", bus)


class TestPrefill(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Prefill("p0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY))


class TestDecode(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Decode("d0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY))
