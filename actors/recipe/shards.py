"""The entrypoint shards, as a recipe sees them: who is here, who owns a request, who has stopped answering.

The quota actors likewise, who own tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from actors.rules.owner import Members, choose
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported

MAX_STRIKES = 3
"""So many questions in a row without an answer, and a shard counts as lost."""


class Shards:
    """Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._members = Members()
        self._strikes: Counter[str] = Counter()
        self._pids: dict[str, int] = {}

    def saw(self, report: LoadReported, now_s: float) -> bool:
        """Note a report. True if the shard is new, or has restarted since."""
        if not report.is_accepting:
            self.forget(report.id)
            return False
        self._pids[report.id] = report.pid
        return self._members.saw(report.id, report.incarnation, now_s)

    def forget(self, shard: str) -> None:
        """It takes no more requests, or is gone. Idempotent."""
        self._members.forget(shard)
        self._strikes.pop(shard, None)

    def ended(self, exited: ProcessExited) -> list[str]:
        """The shards that ended with a process. Word of it may be late: who has reported from another one since is not
        meant."""
        return [id for id in exited.ids(Role.ENTRYPOINT) if self._pids.get(id, exited.pid) == exited.pid]

    def alive(self, now_s: float) -> list[str]:
        """Those heard of lately."""
        return self._members.alive(now_s)

    def owner(self, key: str, tried: Collection[str], now_s: float) -> str:
        """Whose a request (or tenant) is, of those not tried yet; empty if there is nobody."""
        shards = [shard for shard in self.alive(now_s) if shard not in tried]
        return choose(key, shards) if shards else ""

    def owner_of(self, key: str, clock: Callable[[], float]) -> Callable[[Collection[str]], str]:
        """The same, to be asked again and again."""
        return lambda tried: self.owner(key, tried, clock())

    def answered(self, shard: str) -> None:
        """It has answered a question."""
        self._strikes.pop(shard, None)

    def was_silent(self, shard: str) -> bool:
        """A question went without an answer. True if that was one too many."""
        self._strikes[shard] += 1
        return self._strikes[shard] >= MAX_STRIKES
