"""Who has the state of a request."""

from __future__ import annotations

from dataclasses import dataclass

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
