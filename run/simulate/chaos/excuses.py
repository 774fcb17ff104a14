"""Which failures a request may end with, for what was done to the system it ran in."""

from __future__ import annotations

from collections.abc import Iterable

from actors.entrypoint.actor import ROUTE_PATIENCE_S
from run.simulate.chaos.call import Call
from run.simulate.chaos.clients import SOON_LIMITED
from run.simulate.chaos.script import (
    Apart,
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
from schemas.failure import Code
from schemas.message import Role
from schemas.request import Failed
from supervisors.grace import MOVING_S

ECHO_S = 60.0
"""So long after a fault something may still come of it."""

ENOUGH = 3
"""Replicas that a request may lose and be computed anew: with so many it ends."""

_DISTURBED = frozenset({Code.WORKER_LOST, Code.NO_REPLICA, Code.OVERLOADED, Code.NO_RESPONDERS, Code.SHUTTING_DOWN})
"""What may come of faults that cannot all be made good. Never `internal`."""

_LATE = frozenset({Code.NO_RESPONDERS, Code.SHUTTING_DOWN, Code.WORKER_LOST, Code.OVERLOADED})
"""The same of a request with a deadline whose shard is gone: it waits for another one no longer than that, and what is
left of its time then may be too short."""

_UNSEEN = _DISTURBED | {Code.VISION_ERROR}
"""The same of a request with images: what vision has of them is not kept for long."""


def is_excused(call: Call, script: Script, began_s: float) -> bool:
    """Whether the failure that ended it is one that a client may be told, under this script."""
    assert isinstance(call.end, Failed)
    failure = call.end.failure
    if failure.code is Code.DEADLINE_EXCEEDED and call.ask.deadline_s and failure.field:
        return True
    if failure.code is Code.RATE_LIMITED:
        return call.ask.tenant == SOON_LIMITED and script.shape.quota > 0
    first_s, last_s = call.begun_s - began_s, call.ended_s - began_s
    last_s += 1e-6  # what ends at once by a fault ends at its time, but for the rounding of a difference
    faults = [fault for fault in script.faults if fault.at_s <= last_s and first_s <= fault.at_s + ECHO_S]
    if call.ask.deadline_s and failure.code in _LATE:
        if any(getattr(fault, "name", "").startswith("entrypoint/") for fault in faults):
            return True
    if call.ask.images:
        if failure.code is Code.VISION_ERROR and any(_found_nobody(fault, first_s, last_s) for fault in faults):
            return True
        return failure.code in _UNSEEN and any(weight(fault, "vision", "entrypoint") for fault in faults)
    if failure.code not in _DISTURBED:
        return False
    if any(_is_all_away(script.shape.group, fault, faults) for fault in faults):
        return True
    return sum(weight(fault) for fault in faults) >= ENOUGH


def weight(fault: Fault, *more: str) -> int:
    """How much of an excuse it is: ENOUGH, if a request may end by it alone; 0, if all of it must be made good. `more`:
    roles whose loss may be one, too."""
    match fault:
        case Messages(kind=kind):
            return ENOUGH if kind in ("asks", "answers") else 0
        case Kill(name=name):
            role = _role(name)
            if role == "quota" or role.endswith("-balancer"):
                return ENOUGH
            return 1 if role in ("prefill", "decode", "entrypoint", *more) else 0
        case Stand(name=name) | Apart(name=name):
            role = _role(name)
            if role in ("entrypoint", "quota") or role.endswith("-balancer"):
                return ENOUGH
            return 1 if role in ("prefill", "decode", *more) else 0
        case Restart():
            return ENOUGH
        case Slow() | Hang():
            return 1
        case Replace():  # what is sent there meanwhile is heard by both, and what one of them has is lost
            return 2
        case Leave(name=name):
            return int(_role(name) in more)
    return 0


def _is_all_away(group: str, hung: Fault, faults: Iterable[Fault]) -> bool:
    """Whether a rank of the group hangs for longer than a request waits for room, and something happened to another
    one, too: it has left, or waits for the one that hangs."""
    if not isinstance(hung, Hang) or _role(hung.name) != group or hung.for_s <= ROUTE_PATIENCE_S:
        return False
    others = {getattr(fault, "name", "") for fault in faults if weight(fault, group)} - {hung.name}
    return group in map(_role, others)


def _found_nobody(fault: Fault, first_s: float, last_s: float) -> bool:
    """Whether it may be a decode replica's that has left, for which no other one had room in all that time."""
    if not isinstance(fault, Leave) or _role(fault.name) != Role.DECODE:
        return False
    return first_s <= fault.at_s + fault.grace_s + MOVING_S <= last_s


def _role(name: str) -> str:
    return name.partition("/")[0]
