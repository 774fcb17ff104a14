"""Who takes part in the cache: the metadata shards, and the prefill replicas, whose blocks are of one space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from actors.rules.owner import Members
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported


class Peers:
    """Those heard of lately. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._shards = Members()
        self._prefill = Members()
        self._spaces: dict[str, str] = {}
        self._space = ""

    def saw(self, report: LoadReported, now_s: float) -> bool:
        """Note a report of either role. True for a prefill replica that should be asked what its space is."""
        members = self._prefill if report.role is Role.PREFILL else self._shards
        return members.saw(report.id, report.incarnation, now_s) and report.role is Role.PREFILL

    def described(self, replica: str, space: str | None) -> None:
        """Its answer; None if there was none: it is asked again when it reports again."""
        if space is None:
            self._prefill.forget(replica)
        else:
            self._spaces[replica] = space

    def silent(self, shards: Iterable[str]) -> None:
        """These did not answer: they are nobody until they report again."""
        for shard in shards:
            self._shards.forget(shard)

    def exited(self, exited: ProcessExited) -> None:
        """Actors of these roles may have ended with a process."""
        self.silent(exited.ids(Role.METADATA))
        for replica in exited.ids(Role.PREFILL):
            self._prefill.forget(replica)

    def shards(self, now_s: float) -> list[str]:
        """The metadata shards, sorted."""
        return self._shards.alive(now_s)

    def space(self, now_s: float) -> str:
        """The space of most prefill replicas, or the last one known while none is here; empty before any is known."""
        alive = self._prefill.alive(now_s)
        self._spaces = {replica: space for replica, space in self._spaces.items() if replica in alive}
        if self._spaces:
            num_of = Counter(self._spaces.values())
            self._space = max(sorted(num_of), key=num_of.__getitem__)
        return self._space
