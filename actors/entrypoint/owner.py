"""Who has the state of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from schemas.message import Role


@dataclass(frozen=True, slots=True)
class Owner:
    """Where the state of a request is."""

    role: Role
    replica: str

    @classmethod
    def of(cls, source: str) -> Owner:
        """Who `source` of a TokensEmitted, `role/id`, is. Raises ValueError if it is nobody."""
        role, _, replica = source.partition("/")
        if not replica.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{source!r} has no id")
        return cls(Role(role), replica)


class Life(NamedTuple):
    """Of an owner: its process, and the generation of its group when it took the request. 0 for what is not known, or
    where there is none."""

    pid: int = 0
    generation: int = 0

    def ends_with(self, gone: Life) -> bool:
        """Whether it is, or may be, among what is gone: word of an end may be late, when its successor is there."""
        is_other = self.pid and gone.pid and self.pid != gone.pid
        is_later = gone.generation and self.generation > gone.generation
        return not is_other and not is_later


UNKNOWN = Life()
