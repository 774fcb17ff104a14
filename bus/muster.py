"""Which ranks of a group wait to meet, who of them leads, and when a meeting is due (design §6). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from schemas.experts import MeetRanks, RankPresent

FRESH_S = 1.5
"""Who has not said for so long that it waits, does so no longer: who waits says it some times a second."""

FIRST_S = 100.0
"""For so long the first meeting of all waits for each rank: some load their weights for longer."""

AGAIN_S = 3.0
"""And a later one for those of the last one of which nobody says that they have ended."""

GIVE_UP_S = 30.0
"""After which too few ranks wait no longer: what they hold is computed anew by others."""


class News(Enum):
    """What word of another rank means for a group that is at work."""

    NOTHING = auto()
    BROKEN = auto()
    """A member has left it, or begun a new life; or there is a newer group without us."""
    GROWS = auto()
    """A rank waits that could be in it, and this one leads."""


class Muster:
    """One rank's knowledge of the others. Who waits says so to all (`RankPresent`). One of those leads: of the latest
    generation, as it knows best who should be there, the first by rank. It says who meets (`MeetRanks`): all that wait,
    once those are there that are expected, or have been waited for; who comes anew at the first try only. Two that lead
    at the same time cost a meeting that not all come to, and lose nothing: any ranks that have met can do all there is
    to do.
    """

    def __init__(self, ids: Sequence[str], id: str, life: int, least: int) -> None:
        """`least`: fewer ranks than so many do not meet, as they could not hold all experts."""
        self.ids, self.id, self.life, self._least = tuple(ids), id, life, least
        self.generation = 0
        self.members: dict[str, int] = {}
        """Of that generation, by rank, and their lives."""
        self.is_waiting = True
        self._since_s = 0.0
        self._tried = 0
        self._heard: dict[str, tuple[RankPresent, float]] = {}
        self._gone: set[str] = set()
        self._left_out: set[str] = set()

    @property
    def present(self) -> RankPresent:
        """What this rank says of itself."""
        return RankPresent(id=self.id, life=self.life, generation=self.generation, is_waiting=self.is_waiting)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its generation."""
        return next(iter(self.members), "") == self.id

    @property
    def missing(self) -> list[str]:
        """Ranks that are not in this generation."""
        return [id for id in self.ids if id not in self.members]

    def wait(self, now_s: float) -> None:
        """From now on this rank waits: it was started, or its group is broken or called off."""
        self.is_waiting, self._since_s = True, now_s

    def hear(self, present: RankPresent, now_s: float) -> News:
        """Word of another rank."""
        id, mine = present.id, self.members.get(present.id)
        known = self._heard.get(id)
        if id not in self.ids or id == self.id or (known is not None and known[0].life > present.life):
            return News.NOTHING
        if present.is_waiting:
            self._heard[id] = present, now_s
            self._gone.discard(id)
        if self.is_waiting:
            return News.NOTHING
        if not present.is_waiting:
            return News.BROKEN if present.generation > self.generation else News.NOTHING
        if mine is None:
            return News.GROWS if self.is_first else News.NOTHING
        has_left = present.life == mine and present.generation >= self.generation  # else it is what it said before
        return News.BROKEN if has_left or present.life > mine else News.NOTHING

    def lose(self, id: str) -> bool:
        """Its process has ended. Whether the group is broken by that."""
        self._gone.add(id)
        self._heard.pop(id, None)
        return id in self.members and id != self.id and not self.is_waiting

    def convene(self, now_s: float) -> list[str]:
        """The ranks that meet now, this one first, if it leads and it is time; else none."""
        waiting = self._waiting(now_s)
        leader = max(waiting, key=lambda id: (waiting[id].generation, -self.ids.index(id)))
        if leader != self.id or len(waiting) < self._least:
            return []
        expected = set(self.members if self.generation else self.ids) - self._gone
        patience_s = AGAIN_S if self.generation else FIRST_S
        if not expected <= set(waiting) and now_s - self._since_s < patience_s:
            return []
        others = [id for id in self.ids if id in waiting and id != self.id]
        tried = [id for id in others if id not in self._left_out]
        return [self.id, *(tried if len(tried) + 1 >= self._least else others)]

    def call(self, ids: Sequence[str], now_s: float, clock_ns: int, address: str) -> MeetRanks:
        """To a meeting of these, who were said to `convene` at `now_s`. Of two that lead at the same moment each has a
        generation of its own: of two groups with equal ones neither would know that it is to give way."""
        waiting, num = self._waiting(now_s), len(self.ids)
        least = max(clock_ns, 1 + max(self._tried, *(one.generation for one in waiting.values())))
        self._tried = -(-least // num) * num + self.ids.index(self.id)
        return MeetRanks(
            generation=self._tried, ids=list(ids), lives=[waiting[id].life for id in ids], address=address
        )

    def lost(self, call: MeetRanks) -> list[str]:
        """Members of the last generation that do not come to a meeting, or have lost what they held."""
        coming = dict(zip(call.ids, call.lives, strict=True))
        return [id for id, life in self.members.items() if coming.get(id) != life]

    def accepts(self, call: MeetRanks) -> bool:
        """Whether this rank goes to a meeting: not twice to the same one."""
        if not self.is_waiting or call.generation <= max(self._tried, self.generation):
            return False
        if dict(zip(call.ids, call.lives, strict=False)).get(self.id) != self.life:
            return False
        self._tried = call.generation
        return True

    def failed(self, call: MeetRanks, now_s: float) -> None:
        """Not all have come. The next one is without those who were to come anew, if it can be: one that cannot be met
        must not keep the others from going on."""
        self._left_out = set(call.ids).difference(self.members) if self.members else set()
        self.wait(now_s)

    def met(self, call: MeetRanks) -> None:
        """All have come."""
        self.generation, self.members = call.generation, dict(zip(call.ids, call.lives, strict=True))
        self.is_waiting, self._left_out = False, set()
        self._heard.clear()  # what was said before the meeting is over

    def is_hopeless(self, now_s: float) -> bool:
        """Whether others should do what this rank holds: too few of its group are left."""
        has_waited = self.generation > 0 and now_s - self._since_s > GIVE_UP_S
        return has_waited and len(self._waiting(now_s)) < self._least

    def _waiting(self, now_s: float) -> dict[str, RankPresent]:
        """Those that wait, as they said last; this one does."""
        fresh = {id: present for id, (present, heard_s) in self._heard.items() if now_s - heard_s <= FRESH_S}
        return {self.id: self.present, **fresh}
