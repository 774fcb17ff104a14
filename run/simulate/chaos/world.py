"""The system under a script: real actors, whom a supervisor starts anew, and the faults done to them."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, cast

from actors.balancers.actor import DecodeBalancer, PrefillBalancer, VisionBalancer
from actors.decode.actor import Decode
from actors.prefill.actor import Prefill
from actors.quota.actor import Quota
from actors.rules.slab import Slab
from actors.vision.actor import Vision
from bus.actor import Actor
from bus.bulk import MemoryBulk
from bus.bus import Bus
from bus.meeting import GroupOf
from bus.memory import MemoryWire
from bus.memory_files import MemoryFolder
from bus.subjects import EXITED
from run.simulate.chaos.broker import ChaosBroker, ChaosBulk, ChaosWire, Hears
from run.simulate.chaos.clients import TENANTS
from run.simulate.chaos.grammar import ChaosGrammars
from run.simulate.chaos.images import CONFIG, ChaosEncoder
from run.simulate.chaos.loop import OWNER, StandingLoop
from run.simulate.chaos.script import (
    Apart,
    Disk,
    Fault,
    Hang,
    Kill,
    Leave,
    Messages,
    Replace,
    Restart,
    Script,
    Slow,
    Stand,
)
from run.simulate.chaos.truth import ChaosEngine, ChaosRank, decode_engine, prefill_engine
from run.simulate.ranks import Crew
from run.simulator import World
from run.watch import NUM_MISSED, ROUND_S
from schemas.liveness import ProcessExited

SLAB_BYTES = Slab(64, 8, bytes(16), 0).file_bytes
PATIENCE_S = NUM_MISSED * ROUND_S
"""How long a supervisor lets an actor stand still before it kills it."""

TOLD_S = 0.05
"""From the end of a process to the word of it."""


class ChaosWorld(World):
    """Actors by `role/id`, as in `World`. `hears` is told of all that is sent."""

    def __init__(self, script: Script, hears: Hears) -> None:
        self.chaos = ChaosBroker(hears)
        super().__init__(script.seed, self.chaos)
        self.script = script
        self.folder = MemoryFolder(2 * script.shape.budget_slabs * SLAB_BYTES)
        self.killed: list[str] = []
        """Whose process ended, each time."""
        self.engines: dict[str, ChaosEngine] = {}
        self._crew = self._group = None
        if role := script.shape.group:
            num_ranks = getattr(script.shape, role)
            self._crew, self._group = Crew(num_ranks), tuple(f"{role[0]}{id}" for id in range(num_ranks))
        self._lives = Counter[str]()
        self._supervisor: Bus | None = None
        self._restarts = dict[asyncio.Task[None], None]()

    # Being there

    def make_wire(self, name: str) -> MemoryWire:
        """See `World`."""
        wire = ChaosWire(self.chaos, name)
        self.chaos.wires.append(wire)
        if not self.chaos.is_up.is_set():
            wire.leave()
        return wire

    def make_bulk(self, name: str) -> MemoryBulk:
        """See `World`."""
        return ChaosBulk(self.hub, self.wire(name))

    def wire(self, name: str) -> ChaosWire:
        """An actor's present one."""
        return cast(ChaosWire, self.wires[name])

    async def open(self) -> None:
        """Start all of it, but for the clients."""
        self._supervisor = await self.bus("supervisor/s0")
        shape = self.script.shape
        for id in range(shape.balancers):
            await self.begin(f"prefill-balancer/pb{id}")
            await self.begin(f"decode-balancer/db{id}")
            if shape.vision:
                await self.begin(f"vision-balancer/vb{id}")
        await self.begin("kvstore/k0")
        numbers = {"metadata/m": shape.metadata, "writer/w": shape.writers}
        numbers |= {"vision/v": shape.vision, "quota/q": shape.quota}
        numbers |= {"prefill/p": shape.prefill, "decode/d": shape.decode, "entrypoint/e": shape.entrypoints}
        for prefix, number in numbers.items():
            names = [f"{prefix}{id}" for id in range(number)]
            if prefix.startswith(f"{shape.group}/"):  # ranks wait for each other
                await asyncio.gather(*map(self.begin, names))
                continue
            for name in names:
                await self.begin(name)

    async def begin(self, name: str) -> None:
        """Start an actor."""
        role, _, id = name.partition("/")
        match role:
            case "prefill-balancer":
                await self.add(PrefillBalancer(id, await self.bus(name)))
            case "decode-balancer":
                await self.add(DecodeBalancer(id, await self.bus(name)))
            case "vision-balancer":
                await self.add(VisionBalancer(id, await self.bus(name)))
            case "quota":
                await self.add(Quota(id, await self.bus(name), TENANTS))
            case "vision":
                await self.add(Vision(id, await self.bus(name), await self.bulk(name), ChaosEncoder(), CONFIG))
            case "kvstore":
                await self.add_kvstore(id, self.script.shape.budget_slabs * SLAB_BYTES)
            case "metadata":
                await self.add_metadata(id)
            case "writer":
                await self.add_writer(id, SLAB_BYTES)
            case "entrypoint":
                await self.add_entrypoint(id)
            case "prefill":
                engine = self.engines[name] = prefill_engine(*self._rank(name))
                bus, bulk, files = await self.bus(name), await self.bulk(name), self.open_files(name)
                await self.add(Prefill(id, bus, bulk, engine, files, group=self._group_of(name)))
            case "decode":
                engine = self.engines[name] = decode_engine(self.script.shape, *self._rank(name))
                bus, bulk = await self.bus(name), await self.bulk(name)
                decode = Decode(id, bus, bulk, engine, group=self._group_of(name))
                decode._grammars = ChaosGrammars()  # type: ignore[assignment]
                await self.add(decode)
            case _:
                raise ValueError(f"{name}: there is no such role")

    def _rank(self, name: str) -> tuple[Crew | None, int]:
        """Its group, if it is in one, and its place there."""
        role, _, id = name.partition("/")
        return (self._crew, self._group.index(id)) if self._group and role == self.script.shape.group else (None, 0)

    def _group_of(self, name: str) -> GroupOf | None:
        crew, _ = self._rank(name)
        if crew is None or self._group is None:
            return None
        self._lives[name] += 1
        return GroupOf(self._group, self._lives[name], crew.timeout_s)

    def kill(self, name: str) -> None:
        """See `World`. Who waits for it in a group hears at once."""
        self._disconnect(self.engines.get(name))
        super().kill(name)

    def _disconnect(self, engine: ChaosEngine | None) -> None:
        if isinstance(engine, ChaosRank):
            engine.part.abandon()

    async def add(self, actor: Actor) -> None:
        """See `World`. All that it does is its own: so it can stand still."""
        wire = self.wires[f"{actor.role}/{actor.id}"]
        context = contextvars.copy_context()
        context.run(OWNER.set, wire)
        await asyncio.create_task(super().add(actor), context=context)

    def is_alive(self, name: str) -> bool:
        """It has started, and not ended."""
        return name in self.tasks and not self.tasks[name].done() and not self.wire(name).is_cut

    def _dies(self, name: str) -> Callable[[], None]:
        return lambda: self._kill(name, 0.1, True)

    # Faults

    def begin_fault(self, fault: Fault) -> None:
        """Do it, and undo it when its time is over."""
        match fault:
            case Messages():
                self.chaos.begin(fault)
                self._later(fault.for_s, self.chaos.end, fault)
            case Apart(name=name, for_s=for_s) if self.is_alive(name):
                wire = self.wire(name)
                wire.num_apart += 1
                self._later(for_s, _end_apart, wire)
            case Kill(name=name) if self.is_alive(name):
                self._kill(name, fault.back_s, fault.is_told)
            case Stand() if self.is_alive(fault.name):
                self._stand(fault)
            case Replace() if self.is_alive(fault.name) and not self.wire(fault.name).num_still:
                self._replace(fault)
            case Leave() if self.is_alive(fault.name):
                self._at_work(self._leave(fault))
            case Slow(name=name, factor=factor) if self.is_alive(name):
                engine = self.engines[name]
                engine.slow(factor)
                self._later(fault.for_s, engine.slow, 1.0)
            case Hang(name=name) if self.is_alive(name):
                engine = self.engines[name]
                engine.hang()
                self._later(fault.for_s, engine.go_on)
            case Disk() if self.is_alive(fault.name):
                self._harm(fault)
            case Restart(seed=seed) if self.chaos.is_up.is_set():
                self.chaos.go_down()
                self._later(fault.for_s, self.chaos.come_up, random.Random(seed))

    def _later(self, seconds: float, undo: object, *args: object) -> None:
        asyncio.get_running_loop().call_later(seconds, undo, *args)  # type: ignore[arg-type]

    def _kill(self, name: str, back_s: float, is_told: bool) -> None:
        self.killed.append(name)
        self._loop.go_on(self.wire(name))  # so that it can end
        self.kill(name)
        self._start_later(name, self._ended(self.tasks.pop(name), name, is_told), back_s)

    def _start_later(self, name: str, ending: Coroutine[Any, Any, None], back_s: float) -> None:
        self._at_work(self._start_again(name, ending, back_s))

    def _at_work(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._restarts[task] = None
        task.add_done_callback(lambda done: self._restarts.pop(done))

    async def _start_again(self, name: str, ending: Coroutine[Any, Any, None], back_s: float) -> None:
        """What a supervisor does about an actor that has ended."""
        await ending
        await asyncio.sleep(back_s)
        await self.chaos.is_up.wait()  # no process starts without a broker
        await self.begin(name)

    async def _ended(self, task: asyncio.Task[None], name: str, is_told: bool) -> None:
        """Its process has, which others are told."""
        await asyncio.wait([task])
        await asyncio.sleep(TOLD_S)
        if is_told:
            assert self._supervisor is not None
            await self._supervisor.tell(EXITED.all(), ProcessExited(name=name, pid=self.pids[name], members=[name]))

    def _stand(self, fault: Stand) -> None:
        wire = self.wire(fault.name)
        wire.num_still += 1
        self._loop.stand(wire)
        if fault.is_watched and fault.for_s > PATIENCE_S:
            self._later(PATIENCE_S, self._found_out, fault.name, wire)
        else:
            self._later(fault.for_s, self._go_on, wire)

    def _found_out(self, name: str, wire: ChaosWire) -> None:
        if self.wires[name] is wire and self.is_alive(name):
            wire.num_still = 0
            self._kill(name, 0.1, True)

    async def _leave(self, fault: Leave) -> None:
        name, wire, task = fault.name, self.wire(fault.name), self.tasks.get(fault.name)
        if task is None:
            return  # it was killed at this very moment
        context = contextvars.copy_context()
        context.run(OWNER.set, wire)
        await asyncio.create_task(self.actors[name].leave(fault.grace_s), context=context)
        if self.tasks.get(name) is not task or not self.is_alive(name):
            return  # it was killed meanwhile
        self.killed.append(name)
        del self.tasks[name]
        task.cancel()
        await asyncio.wait([task])
        wire.cut()
        self._disconnect(self.engines.get(name))
        self.bulks[name].cut()
        await self._start_again(name, self._ended(task, name, True), 0.1)

    def _replace(self, fault: Replace) -> None:
        name = fault.name
        wire, bulk, files = self.wire(name), self.bulks[name], self.files.get(name)
        task, engine = self.tasks.pop(name), self.engines[name]
        self.killed.append(name)
        wire.num_still += 1
        self._loop.stand(wire)

        def end() -> None:
            wire.cut()
            bulk.cut()
            if files is not None:
                files.cut()
            self._disconnect(engine)
            self._loop.go_on(wire)
            task.cancel()

        self._start_later(name, asyncio.sleep(0), PATIENCE_S)
        self._later(fault.for_s, self._go_on, wire)
        self._later(fault.for_s + fault.more_s, end)

    def _go_on(self, wire: ChaosWire) -> None:
        wire.num_still = max(0, wire.num_still - 1)
        if not wire.num_still:
            wire.hear_held()
            self._loop.go_on(wire)

    def _harm(self, fault: Disk) -> None:
        files, names = self.files[fault.name], list(self.folder.files)
        if fault.what in ("error", "full"):
            for _ in range(fault.num):
                files.fail_next(OSError(errno.EIO if fault.what == "error" else errno.ENOSPC, "no"))
        elif names:
            name = names[int(fault.place * len(names))]
            size = len(self.folder.files[name])
            at = int(fault.place * 7919 * size) % size if size else 0
            if size and fault.what == "flip":
                files.flip(name, at)
            elif size:
                files.truncate(name, at)

    @property
    def _loop(self) -> StandingLoop:
        return cast(StandingLoop, asyncio.get_running_loop())

    @property
    def away(self) -> list[str]:
        """Who has not ended, or not come back."""
        return [name for name in self.actors if not self.is_alive(name)]

    async def calm(self) -> None:
        """Return when what was killed is back."""
        while self._restarts:
            await asyncio.wait(list(self._restarts))
        for files in self.files.values():
            files.heal()


def _end_apart(wire: ChaosWire) -> None:
    wire.num_apart -= 1
