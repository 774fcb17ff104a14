"""A node on a real broker, with small actors of our own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from bus.actor import Actor, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, Delivery
from bus.server import ServerConfig
from bus.subjects import Subject, ping
from kernels.shards import CheckpointError
from run.cluster import Member, ProcessSpec
from run.health import collect_loads, find_silent, on_bus
from run.node import Node, _main, find_mistake
from run.settings import Settings, SettingsError
from schemas.liveness import Ping
from schemas.message import Role
from schemas.routing import Release
from supervisors.strategy import GaveUp
from tests.conftest import Run

pytestmark = pytest.mark.nats

MEMBERS = (Member(Role.PREFILL, "p0"), Member(Role.DECODE, "d0"))
SPEC = ProcessSpec("pair", MEMBERS, num_threads=1)
RELEASE: Subject[Release, None] = Subject(Role.DECODE, "release", Release)
CRASH = RELEASE.at("d0")


class Fragile(Actor):
    """Crashes when it is told to release reservation 13."""

    role = Role.DECODE

    def __init__(self, id: str, bus: Bus, role: Role) -> None:
        super().__init__(id, bus)
        self.role = role  # type: ignore[misc]

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RELEASE: self._on_release}

    async def _on_release(self, message: Release, envelope: object) -> None:
        if message.reservation == 13:
            raise ValueError("unlucky")


def build(member: Member, bus: Bus, bulk: Bulk, spec: ProcessSpec, settings: Settings) -> Actor:
    if member.id == "broken":
        raise ValueError("cannot be built")
    return Fragile(member.id, bus, member.role)


@asynccontextmanager
async def running(
    server: ServerConfig, make: Callable[..., Actor] = build, spec: ProcessSpec = SPEC
) -> AsyncIterator[tuple[Bus, asyncio.Task[None]]]:
    """A node that is up, and a bus beside it. Leaves the node's own end to the test, or stops it."""
    url = server.url(server.internal)
    node = Node(spec, _settings(url), make)
    is_ready = asyncio.Event()
    task = asyncio.create_task(node.run(is_ready.set))
    waiting = asyncio.create_task(is_ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    async with asyncio.timeout(30), on_bus(url, name="test") as bus:
        try:
            yield bus, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _settings(url: str) -> Settings:
    return Settings.from_environment({"SHOAL_NATS_URL": url})


def test_actors_answer_and_are_gone_after_a_stop(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        async with running(nats_server) as (bus, task):
            assert await find_silent(bus, MEMBERS, timeout_s=10.0) == set()
            loads = await collect_loads(bus, wait_s=0.3)
            assert [(load.role, load.id, load.pid) for load in loads] == [(r, i, os.getpid()) for r, i in MEMBERS]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await find_silent(bus, MEMBERS, timeout_s=10.0) == set(MEMBERS)

    run_async(main())


def test_a_crashed_actor_comes_back_anew_and_its_neighbour_stays(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        async with running(nats_server) as (bus, _):
            before = [await bus.ask(ping(role).at(id), Ping(), timeout_s=10.0) for role, id in MEMBERS]
            await bus.tell(CRASH, Release(reservation=13))
            while await _incarnation(bus) in ("", before[1].incarnation):
                pass
            neighbour = await bus.ask(ping(Role.PREFILL).at("p0"), Ping(), timeout_s=10.0)
            assert neighbour.incarnation == before[0].incarnation

    run_async(main())


def test_services_are_announced_once_also_after_a_restart(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        answers: list[str] = []

        def on_delivery(delivery: Delivery) -> None:
            answers.append(msgspec.json.decode(delivery.body)["name"])

        async with running(nats_server) as (bus, _):
            before = await bus.ask(ping(Role.DECODE).at("d0"), Ping(), timeout_s=10.0)
            await bus.tell(CRASH, Release(reservation=13))
            while await _incarnation(bus) in ("", before.incarnation):
                pass
            stop = await bus.wire.subscribe("_INBOX.test.services", on_delivery)
            await bus.wire.publish("$SRV.PING", b"", reply="_INBOX.test.services")
            await find_silent(bus, MEMBERS, timeout_s=10.0)  # answers of the same connection come in order
            await stop()
            assert sorted(answers) == ["shoal-decode", "shoal-prefill"]

    run_async(main())


async def _incarnation(bus: Bus) -> str:
    """Of the decode actor; empty while it does not listen."""
    try:
        return (await bus.ask(ping(Role.DECODE).at("d0"), Ping(), timeout_s=10.0)).incarnation
    except BusError:
        return ""


def test_an_actor_that_cannot_be_built_ends_the_node(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        spec = ProcessSpec("pair", (MEMBERS[0], Member(Role.DECODE, "broken")), num_threads=1)
        async with running(nats_server, spec=spec) as (bus, task):
            with pytest.raises(GaveUp, match=r"actors did not start: GaveUp.*decode/broken.*cannot be built"):
                await task
            assert await find_silent(bus, MEMBERS[:1], timeout_s=10.0) == {MEMBERS[0]}

    run_async(main())


class Busy(Fragile):
    """Is drained when it is told so, and remembers that it was told to leave."""

    log: ClassVar[list[str]] = []

    def __init__(self, id: str, bus: Bus, role: Role) -> None:
        super().__init__(id, bus, role)
        self.done = asyncio.Event()

    @property
    def is_drained(self) -> bool:
        return self.done.is_set()

    async def drain(self, grace_s: float = 0.0) -> None:
        self.log.append(f"{self.role} drains")
        await super().drain(grace_s)

    async def on_stop(self) -> None:
        await self.bus.wire.flush()  # raises when the connection is closed already
        self.log.append(f"{self.role} stops")


def test_a_node_leaves_by_roles_and_its_bus_goes_last(run_async: Run, nats_server: ServerConfig) -> None:
    """Who is behind others in the way of a request goes on until they are done (reliability case 12)."""
    made: dict[Role, Busy] = {}

    def make(member: Member, bus: Bus, *_: object) -> Actor:
        made[member.role] = Busy(member.id, bus, member.role)
        return made[member.role]

    async def main() -> None:
        Busy.log.clear()
        url, members = nats_server.url(nats_server.internal), (Member(Role.DECODE, "d0"), Member(Role.ENTRYPOINT, "e0"))
        node = Node(ProcessSpec("two", members, num_threads=1), _settings(url), make)
        is_ready = asyncio.Event()
        life = asyncio.create_task(node.run(is_ready.set))
        await is_ready.wait()
        leaving = asyncio.create_task(node.leave())
        async with on_bus(url, name="test") as bus:
            assert await find_silent(bus, members, timeout_s=10.0) == set()
            assert Busy.log == ["entrypoint drains"]
            made[Role.ENTRYPOINT].done.set()
            while len(Busy.log) < 2:
                await asyncio.sleep(0.01)
            assert await find_silent(bus, members, timeout_s=10.0) == set() and not leaving.done()
            made[Role.DECODE].done.set()
            await leaving
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        assert Busy.log == ["entrypoint drains", "decode drains", "entrypoint stops", "decode stops"]

    run_async(main())


class Lasting(Node):
    """Takes for ever, unless it is ended."""

    def __init__(self) -> None:
        self.is_leaving = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        ready()
        await asyncio.Event().wait()

    async def leave(self) -> None:
        self.is_leaving.set()
        await asyncio.Event().wait()


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize("numbers", [[TERM, TERM], [TERM, INT], [INT]])
def test_a_second_signal_is_quick_and_so_is_an_interrupt(run_async: Run, numbers: list[signal.Signals]) -> None:
    async def main() -> None:
        node = Lasting()
        ending = asyncio.create_task(_main(node))
        await asyncio.sleep(0)
        if len(numbers) > 1:
            os.kill(os.getpid(), numbers[0])
            await node.is_leaving.wait()
            assert not ending.done()
        os.kill(os.getpid(), numbers[-1])
        assert await ending == 0

    run_async(main())


def test_what_a_user_can_mend_is_told_from_a_fault() -> None:
    def gave_up(cause: Exception) -> GaveUp:
        error = GaveUp("decode/d0", "did not start")
        error.__cause__ = cause
        return error

    assert find_mistake(gave_up(gave_up(CheckpointError("a: no")))) == "SHOAL_MODEL: a: no"
    assert find_mistake(gave_up(SettingsError("SHOAL_HOST: no"))) == "SHOAL_HOST: no"
    assert find_mistake(gave_up(ValueError("no"))) == find_mistake(GaveUp("a", "ended once too often")) == ""


def test_only_a_process_that_computes_imports_torch(nats_server: ServerConfig, tmp_path: Path) -> None:
    """The front's actors, built in a fresh process: no torch in it, nor triton."""
    code = (
        "import asyncio, sys\n"
        "from bus.bulk import SocketBulk\n"
        "from bus.bus import Bus\n"
        "from bus.memory import MemoryBroker, MemoryWire\n"
        "from run.build import build\n"
        "from run.cluster import DEFAULT_CLUSTER, read_cluster\n"
        "from run.settings import Settings\n"
        "import run.node, run.up\n"
        "async def main():\n"
        "    front = read_cluster(DEFAULT_CLUSTER)[-1]\n"
        "    assert front.name == 'front' and len(front.members) == 10\n"
        "    bus = Bus(MemoryWire(MemoryBroker()))\n"
        "    settings = Settings.from_environment({'SHOAL_STORE': sys.argv[1]})\n"
        "    for member in front.members:\n"
        "        build(member, bus, SocketBulk(), front, settings)\n"
        "    print(sorted({'torch', 'triton'} & set(sys.modules)))\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd(), timeout=50)
    assert done.stdout.strip() == "[]", done.stderr
