"""Decode: which replica goes on with a computed prompt. By room: what it will hold when all it has are at their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.balancers.choice import Full
from actors.balancers.ledger import Replica
from actors.balancers.turns import Turns
from actors.rules.load import PRIOR_OUTPUT, DecodeLoad, expected_output, promised_room, promised_tokens
from actors.rules.owner import choose
from schemas.routing import Route


class RoomiestInTurn:
    """The replica where the worst of slots and tokens is smallest, with the new request there and all grown to their
    expected end; among equals the least output still to come, then by a hash of replica and request, so that several
    balancers do not fill the same one first.

    A replica that has not room for all that is expected of those it has and of this request is no choice: it would
    refuse. What is expected is its own to say (`promised_room`).
    Room is for those that asked in vain, in their `Turns`: others get only what those before them cannot use. When the
    first fits nowhere, the roomiest replica that can ever hold it takes nobody else until it fits.
    """

    def __init__(self) -> None:
        self._turns = Turns()

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        rooms = [_Room.of(replica) for replica in replicas]
        turn = self._turns.of(route, replicas, _longest(rooms), now_s)
        if turn.is_near:
            for other in turn.before:
                _set_aside(rooms, other)
            if open_ones := [room for room in rooms if room.has(route)]:
                self._turns.goes(turn, now_s)
                return _roomiest(open_ones, rooms, route)
        if any(room.can_ever_hold(route) for room in rooms):  # else nobody waits for it
            self._turns.waits(turn, now_s)
        raise Full(_why_not(rooms, route, len(turn.before)))


@dataclass(slots=True)
class _Room:
    """What is free of a replica: slots, and tokens not promised to anyone. `is_kept`: for someone who needs more."""

    replica: Replica
    load: DecodeLoad
    num_slots: int
    num_tokens: float
    is_kept: bool = False

    @classmethod
    def of(cls, replica: Replica) -> _Room:
        load, report = DecodeLoad.of(replica.report.detail), replica.report
        coming = sum(_needs(held.route, load) for held in replica.on_the_way())
        num_slots = report.capacity_requests - replica.num_requests
        return cls(replica, load, num_slots, report.capacity_tokens - load.reserved_tokens - coming)

    def has(self, route: Route) -> bool:
        if self.is_kept or self.num_slots < 1 or not self.can_ever_hold(route):
            return False
        return _needs(route, self.load) <= self.num_tokens

    def can_ever_hold(self, route: Route) -> bool:
        return _whole(route, self.load) <= self.replica.report.capacity_tokens

    def share(self, route: Route, mean_output: float) -> tuple[float, float]:
        """With `route` there: the worst of slots and tokens when all have grown, and the output still to come."""
        report = self.replica.report
        there = max(self.load.expected_tokens, report.num_tokens)
        routes = [route, *(held.route for held in self.replica.on_the_way())]
        output = sum(expected_output(mean_output, one.num_new) for one in routes)
        num_tokens = there + output + sum(one.num_cached for one in routes)
        slots = (self.replica.num_requests + 1) / report.capacity_requests
        return max(slots, num_tokens / report.capacity_tokens), there - report.num_tokens + output


def _longest(rooms: Sequence[_Room]) -> float:
    """Tokens of the longest request that any takes, 0 when one takes all."""
    longest = [room.load.max_tokens for room in rooms]
    return max(longest) if all(longest) else 0.0


def _needs(route: Route, load: DecodeLoad) -> int:
    """Room that decode counts for it."""
    most = route.num_cached + route.num_new
    num_left = max((min(most, int(load.max_tokens)) if load.max_tokens else most) - route.num_cached, 0)
    return promised_room(route.num_cached, num_left, load.mean_output, is_whole=route.is_whole)


def _whole(route: Route, load: DecodeLoad) -> int:
    """Room that it takes at its longest."""
    return promised_tokens(route.num_cached + route.num_new, load.max_tokens)


def _set_aside(rooms: Sequence[_Room], route: Route) -> None:
    """Take out of the rooms what a request before will use: room for it, or the replica that will be first to have it.

    Nothing is taken from that one meanwhile, so its room only grows: the first waits for no more than it holds now.
    """
    able = [room for room in rooms if room.can_ever_hold(route) and not room.is_kept]
    fitting = [room for room in able if room.has(route)]
    if not able:
        return
    room = max(fitting or able, key=lambda r: (r.num_tokens, r.replica.id))
    if fitting:
        room.num_slots -= 1
        room.num_tokens -= _needs(route, room.load)
    else:
        room.is_kept = True


def _roomiest(open_ones: Sequence[_Room], rooms: Sequence[_Room], route: Route) -> Replica:
    """Outputs on their way are as long everywhere: as they are on average, where someone knows."""
    means = [room.load.mean_output for room in rooms if room.load.mean_output]
    mean_output = sum(means) / len(means) if means else PRIOR_OUTPUT
    shares = {room.replica.id: room.share(route, mean_output) for room in open_ones}
    least = min(shares.values())
    best = [room.replica for room in open_ones if shares[room.replica.id] == least]
    id = choose(route.request_id, (replica.id for replica in best)) if len(best) > 1 else best[0].id
    return next(replica for replica in best if replica.id == id)


def _why_not(rooms: Sequence[_Room], route: Route, num_before: int) -> str:
    if not any(room.can_ever_hold(route) for room in rooms):
        most = max(room.replica.report.capacity_tokens for room in rooms)
        wanted = min(_whole(route, room.load) for room in rooms)
        return f"the request needs room for {wanted} tokens, the largest decode replica has {most} in all"
    if num_before:
        return f"decode is full, and {num_before} requests are before this one"
    return f"all {len(rooms)} decode replicas are full"
