"""The actor contract, held by every actor of the core."""

from __future__ import annotations

from actors.balancers.actor import DecodeBalancer, ExpertBalancer, PrefillBalancer, VisionBalancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.kvstore.actor import KVStore
from actors.metadata.actor import Metadata
from actors.prefill.actor import Prefill
from actors.quota.actor import Quota
from actors.rules.tenants import Tenants
from actors.writer.actor import Writer
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


class TestVisionBalancer(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return VisionBalancer("vb0", bus)


class TestExpertBalancer(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return ExpertBalancer("xb0", bus)


class TestQuota(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Quota("q0", bus, Tenants.parse("[tenants.a]\nrequests_per_minute = 1", "t.toml"))


class TestMetadata(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Metadata("m0", bus, MemoryBulk(MemoryHub()))


class TestKVStore(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return KVStore("k0", bus, MemoryBulk(MemoryHub()), MemoryFiles(), budget_bytes=1 << 30)


class TestPrefill(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Prefill("p0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY), MemoryFiles())


class TestDecode(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Decode("d0", bus, MemoryBulk(MemoryHub()), TimedEngine(info(), VOCABULARY))


class TestWriter(ActorConformance):
    def make(self, bus: Bus) -> Actor:
        return Writer("w0", bus, MemoryBulk(MemoryHub()), MemoryFiles(), 4096)
