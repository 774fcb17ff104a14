"""Expert-parallel groups: calling each other, what experts are asked for, where they are to be, and the end of one."""

from __future__ import annotations

from schemas.message import Message, Role


class StepWanted(Message, frozen=True):
    """Rank to rank: there is work, take part in the step that comes after `num_steps` of this `generation`."""

    generation: int
    num_steps: int


class RankStarted(Message, frozen=True):
    """Rank to rank: `id` starts, and waits to meet the others. Who has met with an earlier `life` of it begins anew.

    Lives of a rank grow; those of different ranks are not compared.
    """

    id: str
    life: int


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
    """Event: the rank `id` found that another of its group is gone or does not answer. The group does not step any
    more: all that its `ranks` held is lost, until they have met again. What they hold since they met in a later
    `generation` than this one is not meant."""

    role: Role
    id: str
    group: str
    ranks: list[str]
    reason: str
    generation: int = 0
