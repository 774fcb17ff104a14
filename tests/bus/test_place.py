"""Placing work: how long, and on what word of the balancer, it is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus, BusError
from bus.place import MOST_PAUSE_S, place
from bus.subjects import RELEASE_PREFILL, ROUTE_PREFILL, Subject
from run.simulator import World
from run.virtual import run_virtual
from schemas.failure import Code, Failure
from schemas.message import Role
from schemas.routing import Release, Route, Routed

PATIENCE_S = 20.0


class Balancer(Actor):
    """Refuses as told, as often as told, then names p0, p1, ... in turn."""

    role = Role.PREFILL_BALANCER

    def __init__(self, id: str, bus: Bus, refusals: list[Failure]) -> None:
        super().__init__(id, bus)
        self.refusals = refusals
        self.routes: list[Route] = []
        self.asked_s: list[float] = []
        self.released: list[int] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {ROUTE_PREFILL: self._on_route, RELEASE_PREFILL: self._on_release}

    async def _on_route(self, route: Route, envelope: Envelope) -> Routed:
        self.routes.append(route)
        self.asked_s.append(self.now_s())
        if self.refusals:
            raise BusError(self.refusals.pop(0))
        return Routed(replica=f"p{len(self.routes)}", reservation=len(self.routes), balancer=self.id)

    async def _on_release(self, release: Release, envelope: Envelope) -> None:
        self.released.append(release.reservation)


def overloaded(retry_after_s: float) -> Failure:
    return Failure(code=Code.OVERLOADED, message="full", retry_after_s=retry_after_s)


def placed(
    refusals: list[Failure], *, deadline_ns: int = 0, num_failing: int = 0, then: Failure | None = None
) -> tuple[Balancer, float, list[str]]:
    """Place one request; the balancer, how long it took, and who was tried. Raises what `place` raises. `then`: what
    the balancer says once, after the first try."""

    async def main() -> tuple[Balancer, float, list[str]]:
        world = World(0)
        balancer = Balancer("pb0", await world.bus("prefill-balancer/pb0"), refusals)
        await world.add(balancer)
        tried: list[str] = []

        async def attempt(routed: Routed) -> bool:
            tried.append(routed.replica)
            balancer.refusals += [then] if then is not None and len(tried) == 1 else []
            return len(tried) > num_failing

        try:
            await place(
                await world.bus("client"),
                ROUTE_PREFILL,
                RELEASE_PREFILL,
                Route(request_id="r", num_new=1, deadline_ns=deadline_ns),
                attempt,
                patience_s=PATIENCE_S,
                is_over=lambda: False,
            )
            took_s = asyncio.get_running_loop().time()
            await asyncio.sleep(0.1)
            return balancer, took_s, tried
        except BusError as error:
            error.add_note(f"after {asyncio.get_running_loop().time():.3f} s")
            raise
        finally:
            await world.stop()

    return run_virtual(main())


def test_a_replica_that_does_not_take_it_is_left_out_and_its_reservation_released() -> None:
    balancer, _, tried = placed([], num_failing=2)
    assert tried == ["p1", "p2", "p3"] and balancer.released == [1, 2]
    assert [route.excluded for route in balancer.routes] == [[], ["p1"], ["p1", "p2"]]


def test_when_nobody_else_is_left_all_are_asked_again() -> None:
    balancer, _, tried = placed([], num_failing=1, then=Failure(code=Code.NO_REPLICA, message="none besides p1"))
    assert [route.excluded for route in balancer.routes] == [[], ["p1"], []] and len(tried) == 2


def test_a_short_wait_is_waited_for_within_bounds() -> None:
    balancer, took_s, _ = placed([overloaded(1.0), overloaded(15.0)])
    first_s, second_s = balancer.asked_s[1] - balancer.asked_s[0], balancer.asked_s[2] - balancer.asked_s[1]
    assert 0.75 <= first_s <= 1.25 and second_s <= 1.25 * MOST_PAUSE_S
    assert first_s != 1.0  # not all come again at once


@pytest.mark.parametrize(("retry_after_s", "deadline_ns"), [(PATIENCE_S + 1, 0), (0.5, 10**12)])
def test_a_wait_that_is_of_no_use_is_refused_at_once(retry_after_s: float, deadline_ns: int) -> None:
    with pytest.raises(BusError) as refused:
        placed([overloaded(retry_after_s)] * 99, deadline_ns=deadline_ns)
    assert refused.value.failure == overloaded(retry_after_s)
    assert refused.value.__notes__ == ["after 0.000 s"]


def test_what_nobody_can_do_by_its_deadline_is_refused_at_once() -> None:
    late = Failure(code=Code.DEADLINE_EXCEEDED, message="it takes 5 s", field="deadline")
    with pytest.raises(BusError) as refused:
        placed([late] * 99, deadline_ns=10**12)
    assert refused.value.failure == late and refused.value.__notes__ == ["after 0.000 s"]


def test_a_balancer_that_was_silent_is_asked_again() -> None:
    silent = Failure(code=Code.DEADLINE_EXCEEDED, message="no answer")
    balancer, _, _ = placed([silent] * 2, deadline_ns=10**12)
    assert len(balancer.routes) == 3


def test_a_wait_that_grows_is_given_up_when_patience_is() -> None:
    with pytest.raises(BusError) as refused:
        placed([overloaded(1.0)] * 99)
    (note,) = refused.value.__notes__
    assert PATIENCE_S - 1.3 < float(note.split()[1]) <= PATIENCE_S


@pytest.mark.parametrize("failure", [overloaded(0.0), Failure(code=Code.NO_REPLICA, message="none")])
def test_when_nobody_can_tell_it_is_tried_again_soon_deadline_or_not(failure: Failure) -> None:
    balancer, took_s, _ = placed([failure] * 5, deadline_ns=10**12)
    assert len(balancer.routes) == 6 and took_s < 1.0
