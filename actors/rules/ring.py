"""The members of one role, each of which owns its part of all block keys: see `bus.blocks.Owners`."""

from __future__ import annotations

from collections.abc import Sequence

from actors.rules.keys import keys, owners
from actors.rules.owner import Members


class Ring(Members):
    """Members that keys are shared out among, by rendezvous hashing. Time is given by the caller, in seconds."""

    def of(self, wanted: Sequence[bytes], now_s: float) -> list[str]:
        """For each key the member that owns it; an empty list when there are no members."""
        members = self.alive(now_s)
        return [members[number] for number in owners(keys(b"".join(wanted)), members)] if members else []
