"""Finding a replica for a piece of work: route, try, release, route again without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import structs

from bus.bus import Bus, BusError
from bus.subjects import Subject
from schemas.routing import Release, Route, Routed

ROUTE_S = 5.0
PAUSE_S = 0.1


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
    reservation of every attempt that failed is released; the one that succeeded is the replica's to release.
    Returns, too, once `is_over`. Raises what `attempt` raises, and the balancer's `BusError` after `patience_s`.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + patience_s
    excluded: list[str] = []
    while not is_over():
        try:
            routed = await bus.ask(route.any(), structs.replace(wanted, excluded=excluded), timeout_s=ROUTE_S)
        except BusError:
            if loop.time() > give_up_s:
                raise
            excluded = []
            await asyncio.sleep(PAUSE_S)
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
