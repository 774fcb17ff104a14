"""The balancer actors: one shell for requests, the policy injected, one for experts. They hold nothing that reports
cannot rebuild."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import structs
from opentelemetry import trace

from actors.balancers.choice import Choice, Full
from actors.balancers.decode import RoomiestInTurn
from actors.balancers.experts import Groups, Planned, Question, Recent
from actors.balancers.ledger import Ledger
from actors.balancers.prefill import ComputeQuota
from actors.balancers.vision import FewestPatches
from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus, BusError, fail
from bus.subjects import (
    BROKEN,
    EXITED,
    EXPERTS,
    LOAD,
    PLACE_DECODE,
    PLACE_PREFILL,
    RELEASE_DECODE,
    RELEASE_PREFILL,
    RELEASE_VISION,
    ROUTE_DECODE,
    ROUTE_PREFILL,
    ROUTE_VISION,
    Address,
    Subject,
    report_load,
)
from schemas.experts import ExpertsUsed, GroupBroken, PlaceExperts
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported, Release, ReportLoad, Route, Routed

tracer = trace.get_tracer("shoal")


class Balancer(Actor):
    """Assigns requests to the replicas of one pool: route → {replica, reservation}; release; reports.

    While no replica reports, it goes on with what it knows of its own: `degraded` in its load counts such decisions.
    """

    pool: ClassVar[Role]
    route_subject: ClassVar[Subject[Route, Routed]]
    release_subject: ClassVar[Subject[Release, None]]

    def __init__(self, id: str, bus: Bus, choice: Choice) -> None:
        super().__init__(id, bus)
        self._choice = choice
        self.ledger = Ledger()
        self._num_degraded = 0
        self._next_reservation = bus.seams.random.getrandbits(40) << 20

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {self.route_subject: self._on_route, self.release_subject: self._on_release}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {
            LOAD.at(self.pool): self._on_load,
            EXITED.all(): self._on_exited,
            BROKEN.at(self.pool): self._on_broken,
        }

    async def on_start(self) -> None:
        await self.bus.tell(report_load(self.pool).all(), ReportLoad())

    @property
    def is_drained(self) -> bool:
        return True  # any other balancer knows as much

    def load(self) -> LoadReported:
        known = {"replicas": float(self.ledger.num_replicas), "degraded": float(self._num_degraded)}
        return structs.replace(super().load(), num_running=self.ledger.num_reserved, detail=known)

    async def _on_route(self, route: Route, envelope: Envelope) -> Routed:
        with tracer.start_as_current_span(f"route {self.pool}", context=envelope.context) as span:
            now_s = self.now_s()
            if route.excluded:
                self.ledger.refused(route.excluded[-1], now_s)
            eligible = self.ledger.eligible(route.excluded, now_s)
            if not eligible:
                but = f" besides {', '.join(route.excluded)}" if route.excluded else ""
                raise fail(Code.NO_REPLICA, f"no {self.pool} replica is ready{but}")
            is_frozen = self.ledger.is_frozen(now_s)
            self._num_degraded += is_frozen
            try:
                replica = self._choice(eligible, route, now_s, self.bus.seams.clock_ns())
            except Full as full:
                why = Failure(code=full.code, message=str(full), field=full.field, retry_after_s=full.retry_after_s)
                raise BusError(why) from None
            self._next_reservation += 1
            reservation = self._next_reservation
            self.ledger.reserve(reservation, replica, route, now_s)
            span.set_attributes({"shoal.replica": replica.id, "shoal.degraded": is_frozen})
            return Routed(replica=replica.id, reservation=reservation, balancer=self.id)

    async def _on_release(self, release: Release, envelope: Envelope) -> None:
        self.ledger.release(release.reservation, self.now_s())

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        self.ledger.report(report, self.now_s())

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for id in exited.ids(self.pool):
            self.ledger.lost(id)

    async def _on_broken(self, broken: GroupBroken, envelope: Envelope) -> None:
        for id in broken.ranks:
            self.ledger.lost(id)


class PrefillBalancer(Balancer):
    """For prompts to compute."""

    role = Role.PREFILL_BALANCER
    pool = Role.PREFILL
    route_subject = ROUTE_PREFILL
    release_subject = RELEASE_PREFILL

    def __init__(self, id: str, bus: Bus, choice: Choice | None = None) -> None:
        super().__init__(id, bus, choice or ComputeQuota(id))


class DecodeBalancer(Balancer):
    """For computed prompts to go on with."""

    role = Role.DECODE_BALANCER
    pool = Role.DECODE
    route_subject = ROUTE_DECODE
    release_subject = RELEASE_DECODE

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus, RoomiestInTurn())


class VisionBalancer(Balancer):
    """For images to encode."""

    role = Role.VISION_BALANCER
    pool = Role.VISION
    route_subject = ROUTE_VISION
    release_subject = RELEASE_VISION

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus, FewestPatches())


class ExpertBalancer(Actor):
    """Has hot experts of expert-parallel groups moved, while they step, so that all ranks have equally much to do.

    A plan is told to the ranks again with each of their reports until all have carried it out, or have met anew.
    """

    role = Role.EXPERT_BALANCER

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.groups = Groups()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {EXPERTS.at(Role.PREFILL): self._on_used, EXPERTS.at(Role.DECODE): self._on_used}

    def load(self) -> LoadReported:
        return structs.replace(super().load(), detail=self.groups.detail())

    async def _on_used(self, used: ExpertsUsed, envelope: Envelope) -> None:
        if (recent := self.groups.of(used)) is None:
            return
        if (planned := recent.report(used)) is not None:
            await self._tell(recent, used.role, planned)
        elif (question := recent.question(used)) is not None:
            self.spawn(self._plan(recent, used.role, question))

    async def _plan(self, recent: Recent, role: Role, question: Question) -> None:
        """Takes a fifth of a second for each uneven layer of a group of 64."""
        advice = await self.bus.seams.run_beside(question.answer)
        if (planned := recent.advised(question, advice, self.bus.seams.clock_ns())) is not None:
            await self._tell(recent, role, planned)

    async def _tell(self, recent: Recent, role: Role, planned: Planned) -> None:
        subject = PLACE_PREFILL if role is Role.PREFILL else PLACE_DECODE
        place = PlaceExperts(generation=recent.generation, version=planned.version, places=planned.places)
        for id in recent.ranks.values():
            await self.bus.tell(subject.at(id), place)
