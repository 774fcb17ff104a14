"""Expert-parallel groups: who meets, calling each other, what experts are asked for and where they are to be."""

from __future__ import annotations

from schemas.message import Message, Role


class StepWanted(Message, frozen=True):
    """Rank to rank: there is work, take part in the step that comes after `num_steps` of this `generation`."""

    generation: int
    num_steps: int


class RankPresent(Message, frozen=True):
    """Rank to rank: `id` is here, in its `life`, and was in `generation` last, 0 if in none.

    `is_waiting`: it has left that generation, if any, and waits to meet the others. Else it is in it, says so for a
    group that is not whole, and others may come to it. Lives of a rank grow; those of different ranks are not compared.
    """

    id: str
    life: int
    generation: int
    is_waiting: bool


class MeetRanks(Message, frozen=True):
    """Command of the rank that leads, the first of `ids`, to those that wait: these meet as `generation`, in this
    order, each in its life, at `address`, where the first one listens. Generations grow."""

    generation: int
    ids: list[str]
    lives: list[int]
    address: str


class ExpertsUsed(Message, frozen=True):
    """Event: what the experts of a group were asked for by one of its ranks, since the report before.

    `used`: for each layer, rows by expert, uint32 LE. `places`: for each layer the expert at each place, rank after
    rank, uint16 LE; of `version`. All ranks report at the same `num_steps`.
    """

    role: Role
    id: str
    group: str
    rank: int
    size: int
    generation: int
    num_steps: int
    version: int
    used: list[bytes]
    places: list[bytes]


class PlaceExperts(Message, frozen=True):
    """Command to each rank of a group: load what `places` ask for and go on with them, layer by layer, as soon as all
    ranks can. `generation` is that of the reports they were planned from: another one ignores them. A higher `version`
    takes the place of what is not carried out yet."""

    generation: int
    version: int
    places: list[bytes]


class GroupBroken(Message, frozen=True):
    """Event: the group goes on without these of its `ranks`, says the rank `id`; what they held is lost. What they hold
    since they met in a later `generation` than this one is not meant."""

    role: Role
    id: str
    group: str
    ranks: list[str]
    reason: str
    generation: int = 0
