"""Finding a replica for a piece of work: route, try, release, route again without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import structs

from bus.bus import Bus, BusError
from bus.subjects import Subject
from schemas.failure import Code, Failure
from schemas.routing import Release, Route, Routed

ROUTE_S = 5.0
PAUSE_S = 0.1

MOST_PAUSE_S = 2.0
"""A balancer's word of when there will be room is an estimate: it is asked again at least this often."""


async def place(
    bus: Bus,
    route: Subject[Route, Routed],
    release: Subject[Release, None],
    wanted: Route,
    attempt: Callable[[Routed], Awaitable[bool]],
    *,
    patience_s: float,
    is_over: Callable[[], bool],
) -> None:
    """Ask the balancer of a pool, and `attempt` to give the work to the replica it names, until one takes it.

    A replica that does not is left out next time; when none is left, all are asked again a little later. The
    reservation of every attempt that failed is released; the one that succeeded is the replica's to release. A balancer
    that is gone is passed over: any other knows as much. Returns, too, once `is_over`.

    Raises what `attempt` raises, and the balancer's `BusError` after `patience_s`. When that says how long it will be
    until there is room, it is raised at once if this is longer than there is patience, and if `wanted` has a deadline:
    that comes nearer as fast as the room. So is its word that nobody can meet the deadline, which names it.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + patience_s
    excluded: list[str] = []
    while not is_over():
        try:
            routed = await bus.ask(route.any(), structs.replace(wanted, excluded=excluded), timeout_s=ROUTE_S)
        except BusError as error:
            if not _is_worth_waiting(error.failure, wanted, give_up_s - loop.time()):
                raise
            excluded = []
            await asyncio.sleep(_pause_s(error.failure, bus.seams.random.random()))
            continue
        is_taken = False
        try:
            is_taken = not is_over() and await attempt(routed)
        finally:
            if not is_taken:
                await bus.tell(release.at(routed.balancer), Release(reservation=routed.reservation))
        if is_taken:
            return
        excluded = [*excluded, routed.replica]


def _is_worth_waiting(failure: Failure, wanted: Route, patience_s: float) -> bool:
    if failure.code is Code.OVERLOADED and failure.retry_after_s > 0:
        return not wanted.deadline_ns and failure.retry_after_s <= patience_s
    is_too_late = failure.code is Code.DEADLINE_EXCEEDED and failure.field  # without a field, the balancer was silent
    return patience_s >= 0 and not is_too_late


def _pause_s(failure: Failure, chance: float) -> float:
    """Not all come again at the same time. `chance`: from 0 to 1."""
    if failure.retry_after_s <= 0:
        return PAUSE_S
    return min(failure.retry_after_s, MOST_PAUSE_S) * (0.75 + chance / 2)
