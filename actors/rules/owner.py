"""Who is here, and which of them owns a key: membership by reports, ownership by rendezvous hashing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

EXPIRY_S = 6.0
"""Three missed heartbeats (bus/actor.py HEARTBEAT_S): a member not heard of for so long is gone."""


def choose(key: str, members: Iterable[str]) -> str:
    """The member that owns `key`: the one with the highest hash of (member, key).

    The same on every node that knows the same members; when one joins or leaves, only its own keys move.
    Raises ValueError when there are no members.
    """

    def weight(member: str) -> tuple[bytes, str]:
        return hashlib.blake2b(f"{member}\0{key}".encode(), digest_size=8).digest(), member

    return max(members, key=weight)


class Members:
    """The actors of one role that were heard of lately. Time is given by the caller, in seconds."""

    def __init__(self) -> None:
        self._last_seen: dict[str, float] = {}
        self._incarnations: dict[str, str] = {}

    def saw(self, id: str, incarnation: str, now_s: float) -> bool:
        """Note a report. True if this id is new, or has restarted since."""
        is_news = self._incarnations.get(id) != incarnation
        self._last_seen[id] = now_s
        self._incarnations[id] = incarnation
        return is_news

    def forget(self, id: str) -> None:
        """It is known to be gone. Idempotent."""
        self._last_seen.pop(id, None)
        self._incarnations.pop(id, None)

    def alive(self, now_s: float) -> list[str]:
        """Those heard of within EXPIRY_S, sorted. The others are forgotten: when they come back they are news."""
        for id in [id for id, seen in self._last_seen.items() if now_s - seen >= EXPIRY_S]:
            self.forget(id)
        return sorted(self._last_seen)
