"""Who answers, and how loaded they are: pings and load reports through the bus."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from bus.broker import NatsWire
from bus.bus import Bus, BusError, Delivery, decoder
from bus.subjects import LOAD, ping, report_load
from run.cluster import Member
from run.settings import SettingsError
from schemas.liveness import Ping
from schemas.message import Role
from schemas.routing import LoadReported, ReportLoad

CHECK_TIMEOUT_S = 3.0


async def find_silent(bus: Bus, members: Iterable[Member], *, timeout_s: float) -> set[Member]:
    """Ping them all at once; those that did not answer in time."""

    async def is_silent(member: Member) -> bool:
        try:
            await bus.ask(ping(member.role).at(member.id), Ping(), timeout_s=timeout_s)
        except BusError:
            return True
        return False

    asked = list(members)
    silences = await asyncio.gather(*map(is_silent, asked))
    return {member for member, silent in zip(asked, silences, strict=True) if silent}


async def collect_loads(bus: Bus, *, wait_s: float) -> list[LoadReported]:
    """Ask everyone to report; what arrived within `wait_s`, the latest of each, in the order of roles and ids."""
    latest: dict[tuple[Role, str], LoadReported] = {}

    def on_delivery(delivery: Delivery) -> None:
        report = decoder(LoadReported).decode(delivery.body)
        latest[(report.role, report.id)] = report

    unsubscribes = [await bus.wire.subscribe(LOAD.at(role).name, on_delivery) for role in Role]
    for role in Role:
        await bus.tell(report_load(role).all(), ReportLoad())
    await asyncio.sleep(wait_s)
    for unsubscribe in unsubscribes:
        await unsubscribe()
    order = list(Role)
    return sorted(latest.values(), key=lambda report: (order.index(report.role), report.id))


def check(members: Iterable[Member], nats_url: str) -> int:
    """Ping these; the exit status, with a line for each that is silent."""

    async def ask() -> set[Member]:
        async with on_bus(nats_url, name="shoal-health") as bus:
            return await find_silent(bus, members, timeout_s=CHECK_TIMEOUT_S)

    try:
        silent = asyncio.run(ask())
    except BusError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    for member in sorted(map(str, silent)):
        print(f"{member}: no answer", file=sys.stderr)
    return 1 if silent else 0


@asynccontextmanager
async def on_bus(nats_url: str, *, name: str) -> AsyncIterator[Bus]:
    """A bus for a short errand. Raises BusError when there is no broker, SettingsError without an address."""
    if not nats_url:
        raise SettingsError("SHOAL_NATS_URL is not set; start one with `shoal up`")
    bus = Bus(await NatsWire.connect(nats_url, name=name, timeout_s=CHECK_TIMEOUT_S))
    try:
        await bus.open()
        yield bus
    finally:
        await bus.close()
