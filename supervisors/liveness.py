"""Who has stopped making progress: pings that go unanswered round after round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Liveness:
    """Counts, for each process, the rounds in a row in which one of its actors left a ping unanswered.

    Progress, not an open socket: a ping is answered from the actor's mailbox, so a stopped process, a blocked loop and
    a hung actor all miss it. Rounds are counted instead of seconds, so that a pause of the watcher itself (a suspended
    laptop) accuses nobody. When the broker could not be reached a round is `void`: silence then proves nothing.
    """

    def __init__(self, num_missed_limit: int) -> None:
        self._limit = num_missed_limit
        self._num_missed: dict[str, dict[str, int]] = {}

    def watch(self, process: str, members: Sequence[str]) -> None:
        """A process is up (again): from the next round on its members must answer."""
        self._num_missed[process] = dict.fromkeys(members, 0)

    def forget(self, process: str) -> None:
        """A process has ended. Idempotent."""
        self._num_missed.pop(process, None)

    def members(self) -> list[tuple[str, str]]:
        """Whom to ping in this round, as (process, member)."""
        return [(process, member) for process, members in self._num_missed.items() for member in members]

    def end_round(self, silent: Iterable[tuple[str, str]]) -> list[str]:
        """The round is over and these did not answer; all others start anew.

        Returns the processes that must be killed, those with a member at the limit. They are forgotten.
        """
        missed = set(silent)
        stuck = []
        for process, members in self._num_missed.items():
            for member in members:
                members[member] = members[member] + 1 if (process, member) in missed else 0
            if any(num >= self._limit for num in members.values()):
                stuck.append(process)
        for process in stuck:
            self.forget(process)
        return stuck

    def void(self) -> None:
        """The broker was out of reach: start counting anew."""
        self.end_round(())
