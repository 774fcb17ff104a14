"""Expert-parallel groups: waking each other, what experts are asked for, and where they are to be."""

from __future__ import annotations

from schemas.message import Message, Role


class StepWanted(Message, frozen=True):
    """Rank to rank: there is work, take part in the step that comes after `num_steps` of this `generation`."""

    generation: int
    num_steps: int


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
    ranks can. `generation` is that of the reports they were planned from: another one ignores them."""

    generation: int
    version: int
    places: list[bytes]


class GroupBroken(Message, frozen=True):
    """Event: a rank found that another is gone or does not answer. Its group does not step any more."""

    role: Role
    id: str
    group: str
    reason: str
