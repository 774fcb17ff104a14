"""Is it there: ping and pong, and the end of a process."""

from __future__ import annotations

from schemas.message import Message, Role


class Ping(Message, frozen=True):
    """Answered by every actor from its mailbox, so an answer shows progress, not just an open socket; while it starts,
    which may be long, from beside it."""


class Pong(Message, frozen=True):
    """`incarnation` is new at each start of the actor; `num_queued` is what waits in its mailbox."""

    role: str
    id: str
    incarnation: str
    num_queued: int


class Drain(Message, frozen=True):
    """Leave: what is here goes on for `grace_s`, and is seen off then. Answered at the end, with the last load report.

    Whoever supervises the actor starts it anew. Idempotent: with an `incarnation`, only that one is meant.
    """

    grace_s: float
    incarnation: str = ""


class ProcessExited(Message, frozen=True):
    """The supervisor saw a process end. Its actors (`members`, as `role/id`) are gone with all they held."""

    name: str
    pid: int
    members: list[str]

    def ids(self, role: Role) -> list[str]:
        """The ids of those of one role."""
        return [id for kind, _, id in (member.partition("/") for member in self.members) if kind == role]
