"""`shoal node`: one OS process. A bus, and on it the actors it was told to run."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

import uvloop

from actors.recipe.card import CardError
from bus.actor import Actor
from bus.broker import NatsWire
from bus.bulk import MAX_BYTES, Bulk, SocketBulk
from bus.bus import Bus, BusError
from kernels.config import ConfigError
from kernels.environment import compute_environment
from kernels.shards import CheckpointError
from run.build import build
from run.cluster import Member, ProcessSpec
from run.settings import LOOPBACK, Settings, SettingsError
from run.telemetry import start_telemetry
from schemas.message import Role
from supervisors.processes import tell_ready
from supervisors.strategy import GaveUp, Intensity, Strategy
from supervisors.tasks import Child, Ready, Run, Stuck, Supervisor

log = logging.getLogger("shoal.node")

GC_THRESHOLD = (20_000, 20, 50)
"""Messages are short-lived and free of cycles: with its default of 700 the collector finds nothing, a hundred times a
second. Looking less often gave a tenth more events through the front."""

INTENSITY = Intensity(3, 10.0)
ACTOR_SHUTDOWN_S = 1.0
"""Less than the root gives the whole process, so that a stuck actor is reported before we are killed."""

MISTAKE = "shoal node: "
"""Begins the line, the last one, of a process that could not start for a reason of the user's; `shoal up` shows it."""

Build = Callable[[Member, Bus, Bulk, ProcessSpec, Settings], Actor]


LEAVING: tuple[tuple[Role, ...], ...] = (
    *((Role.GATEWAY,), (Role.RECIPE,), (Role.ENTRYPOINT,)),
    *((Role.VISION,), (Role.PREFILL, Role.DECODE), (Role.WRITER,)),
)
"""Who leaves first: each has its work done by those behind it. The others have nothing to wait for."""


class Node:
    """The tree of one process: rest_for_one over the bus and a one_for_one supervisor of its actors.

    Actors do not take each other down; a lost bus takes all of them.
    """

    def __init__(self, spec: ProcessSpec, settings: Settings, build: Build = build) -> None:
        self._spec = spec
        self._settings = settings
        self._build = build
        self._wire: NatsWire | None = None
        self._bus: Bus | None = None
        self._bulk: SocketBulk | None = None
        self._announced: set[Member] = set()
        self._actors: dict[Member, Actor] = {}

    async def leave(self) -> None:
        """See off what is here, within the grace and what it takes then. Others serve new requests meanwhile."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._settings.grace_s
        for roles in LEAVING:
            actors = [actor for member, actor in self._actors.items() if member.role in roles]
            await asyncio.gather(*(actor.leave(max(end_s - loop.time(), 0.0)) for actor in actors))

    async def run(self, ready: Ready) -> None:
        """Live until cancelled. Raises GaveUp and Stuck, as supervisors do."""
        actors = [Child(str(member), self._life(member), shutdown_s=ACTOR_SHUTDOWN_S) for member in self._spec.members]
        tree = [
            Child("bus", self._run_bus, shutdown_s=3.0),
            Child(
                "actors",
                lambda ready: Supervisor(self._spec.name, actors, intensity=INTENSITY).run(ready),
                shutdown_s=(ACTOR_SHUTDOWN_S + 0.5) * len(actors),
            ),
        ]
        supervisor = Supervisor(self._spec.name, tree, strategy=Strategy.REST_FOR_ONE, intensity=INTENSITY)
        await supervisor.run(ready)

    async def _run_bus(self, ready: Ready) -> None:
        self._wire = await NatsWire.connect(self._settings.nats_url, name=f"shoal-{self._spec.name}")
        self._bus = Bus(self._wire)
        host = self._settings.host
        keeping = sum(member.role in (Role.PREFILL, Role.DECODE) for member in self._spec.members)
        self._bulk = SocketBulk(
            host=host,
            advertise=host if host == LOOPBACK else socket.gethostname(),
            max_bytes=MAX_BYTES + keeping * self._settings.snapshot_bytes,
        )
        self._announced.clear()
        try:
            await self._bus.open()
            await self._bulk.start()
            ready()
            await self._wire.wait_lost()
            raise ConnectionError("the connection to NATS has ended for good")
        finally:
            await self._bulk.close()
            await self._bus.close()

    def _life(self, member: Member) -> Run:
        """One actor as a supervisor's child: made anew at each start."""

        async def run(ready: Ready) -> None:
            assert self._bus is not None and self._bulk is not None and self._wire is not None
            actor = self._build(member, self._bus, self._bulk, self._spec, self._settings)
            if member not in self._announced:
                self._announced.add(member)
                await self._wire.announce(member.role, member.id, version("shoal"))
            self._actors[member] = actor
            try:
                await actor.run(ready)
            finally:
                del self._actors[member]

        return run


def run_node(spec: ProcessSpec, settings: Settings, build: Build = build) -> NoReturn:
    """Run until SIGTERM or SIGINT, then end the process. The supervisor is told when every actor is ready.

    SIGTERM lets it see off what it has; SIGINT, or a second SIGTERM, ends it at once.
    """
    logging.basicConfig(
        level=settings.log_level,
        format=f"%(asctime)s {spec.name} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if not settings.nats_url:
        raise SettingsError("SHOAL_NATS_URL is not set: a node needs a broker; start one, or use `shoal up`")
    os.environ.update(compute_environment(spec.num_threads))  # before torch is imported
    # A prompt is encoded where it is: waiting for a thread pool costs milliseconds when the cores are busy.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stop_telemetry = start_telemetry(spec.name)
    gc.set_threshold(*GC_THRESHOLD)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_main(Node(spec, settings, build)))
    stop_telemetry()
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End at once: everything is closed, and with torch the interpreter's own way out takes half a second."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


async def _main(node: Node) -> int:
    task: asyncio.Task[Any] = asyncio.create_task(node.run(tell_ready))
    leaving: asyncio.Task[Any] | None = None

    def on_term() -> None:
        nonlocal leaving
        if leaving is None:
            leaving = asyncio.create_task(_leave(node, task))
        else:
            task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_term)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    except GaveUp as error:
        mistake = find_mistake(error)
        if mistake:
            print(MISTAKE + mistake, file=sys.stderr)
        else:
            log.error("%s", error, exc_info=error.__cause__)
        return 1
    except Stuck as error:
        log.critical("%s; ending the process", error)
        _exit(1)
    return 0


async def _leave(node: Node, life: asyncio.Task[Any]) -> None:
    try:
        await node.leave()
    except BusError as error:
        log.warning("there is nobody to leave to: %s", error)
    finally:
        life.cancel()


def find_mistake(error: BaseException) -> str:
    """What the settings or the checkpoint have wrong, where a child did not start for that; else nothing."""
    while isinstance(error, GaveUp) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CardError | ConfigError | CheckpointError):
        return f"SHOAL_MODEL: {error}"
    return str(error) if isinstance(error, SettingsError) else ""
