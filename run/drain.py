"""`shoal drain`: one actor leaves, and others go on with what it has; then it is started anew."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console

from bus.actor import LAST_S
from bus.bus import Bus, BusError, Delivery, decoder
from bus.subjects import EXITED, LOAD, drain, ping
from run.cluster import Member
from run.health import CHECK_TIMEOUT_S, on_bus
from run.node import LEAVING
from schemas.liveness import Drain, Ping, ProcessExited
from schemas.routing import LoadReported


def drain_actor(member: Member, nats_url: str, grace_s: float) -> int:
    """Have it leave and wait for it, with a line whenever something changes; status 0 when nothing was left behind."""

    async def main() -> int:
        async with on_bus(nats_url, name="shoal-drain") as bus:
            return await _drain(bus, member, grace_s, Console(highlight=False))

    try:
        return asyncio.run(main())
    except BusError as error:
        print(f"shoal: {member}: {error}", file=sys.stderr)
        return 1


async def _drain(bus: Bus, member: Member, grace_s: float, console: Console) -> int:
    pong = await bus.ask(ping(member.role).at(member.id), Ping(), timeout_s=CHECK_TIMEOUT_S)
    told = ""

    def say(report: LoadReported) -> None:
        nonlocal told
        if (line := describe(report)) != told:
            told = line
            console.print(f"{member}: {line}", markup=False, soft_wrap=True)

    def on_delivery(delivery: Delivery) -> None:
        report = decoder(LoadReported).decode(delivery.body)
        if (report.id, report.incarnation) == (member.id, pong.incarnation):
            say(report)

    has_ended = asyncio.Event()

    def on_exit(delivery: Delivery) -> None:
        if str(member) in decoder(ProcessExited).decode(delivery.body).members:
            has_ended.set()

    await bus.wire.subscribe(LOAD.at(member.role).name, on_delivery)
    await bus.wire.subscribe(EXITED.all().name, on_exit)
    wanted = Drain(grace_s=grace_s, incarnation=pong.incarnation)
    timeout_s = grace_s + LAST_S + CHECK_TIMEOUT_S
    asking = asyncio.create_task(bus.ask(drain(member.role).at(member.id), wanted, timeout_s=timeout_s))
    ending = asyncio.create_task(has_ended.wait())
    try:
        await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            console.print(f"{member}: ended before it had left: what it held is computed anew", soft_wrap=True)
            return 1
        say(asking.result())
        return 1 if num_left(asking.result()) else 0
    finally:
        asking.cancel()
        ending.cancel()


def num_left(report: LoadReported) -> int:
    """Requests that are still there. What others count is not theirs, as reservations of balancers."""
    return report.num_running + report.num_waiting if any(report.role in roles for roles in LEAVING) else 0


def describe(report: LoadReported) -> str:
    """How far it is."""
    fates = [name for name in ("moved", "given_back") if name in report.detail]
    said = [f"{num_left(report)} left", *(f"{report.detail[name]:.0f} {name.replace('_', ' ')}" for name in fates)]
    if "pause_ms_p50" in report.detail:
        p50, p99 = report.detail["pause_ms_p50"], report.detail["pause_ms_p99"]
        said.append(f"moved ones stood still for {p50:,.0f} ms (p50), {p99:,.0f} ms (p99)")
    return ", ".join(said)
