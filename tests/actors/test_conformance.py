"""The actor contract, held by every actor of the core."""

from __future__ import annotations

from actors.balancers.actor import DecodeBalancer, PrefillBalancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.prefill.actor import Prefill
from actors.quota.actor import Quota
from actors.rules.tenants import Tenants
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus
from bus.memory_files import MemoryFiles
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


class TestQuota(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Quota("q0", bus, Tenants.parse("[tenants.a]\nrequests_per_minute = 1", "t.toml"))


class TestPrefill(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Prefill("p0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY), MemoryFiles())


class TestDecode(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Decode("d0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY))
