"""Room for outputs as they grow: who has the next block, who waits for one, and who makes way when there is none.

Outputs are let in by how long they are expected to be, so now and then all of the room is taken and some want more:

* The oldest here come first. So there is always progress: the oldest never makes way and, unless all the room is that
  of protected requests, which have all they can need and go on, never waits.
* The youngest makes way, as it has the least to be computed again; one that is not in the engine yet before one that
  is, as it has nothing. Making the longest one go would free the most, but throw the most away, and it would never end.
* One goes only when an older one cannot do its next step otherwise. The youngest itself does not go for want of room:
  it waits, with what it has, until there is some, or an older one needs its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.decode.slots import Generation
from actors.rules.load import STEP_TOKENS, promised_tokens
from kernels.engine import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Relief:
    """What is to be done before the next step: those with more room, and how many tokens that is for in all; those that
    are to be preempted, or turned away, who are not in the engine yet; those that cannot take part in the step."""

    grown: list[tuple[Generation, int]] = field(default_factory=list)
    preempted: list[Generation] = field(default_factory=list)
    turned_away: list[Generation] = field(default_factory=list)
    waiting: list[Generation] = field(default_factory=list)


def relieve(here: Sequence[Generation], num_free: int, max_tokens: int) -> Relief:
    """For all that are here, in order of arrival, with `num_free` blocks that are nobody's. Nothing changes yet."""
    relief = Relief()
    running = [(number, one) for number, one in enumerate(here) if one.is_running]
    running = [each for each in running if may_want(each[1], max_tokens)]
    if not running:
        return relief
    young = [(number, one) for number, one in enumerate(here) if _may_go(one)]
    rooms = dict[int, int]()
    for number, one in running:
        if one in relief.preempted:
            break  # so are all behind it that may be; the others have their room
        num_more = _num_more(one, one.num_reserved, one.num_tokens, max_tokens)
        while num_more > num_free and young and young[-1][0] > number:
            gone = young.pop()[1]
            num_free += promised_tokens(gone.num_reserved) // BLOCK_TOKENS
            (relief.preempted if gone.is_in_engine else relief.turned_away).append(gone)
        if num_more > num_free:
            relief.waiting.append(one)
        elif num_more:
            num_free -= num_more
            rooms[number] = promised_tokens(one.num_tokens)
    for number, one in running:
        if one in relief.preempted or one in relief.waiting:
            continue
        num_more = _num_more(one, rooms.get(number, one.num_reserved), one.num_tokens + STEP_TOKENS, max_tokens)
        if 0 < num_more <= num_free:  # so that drafts have room, too
            num_free -= num_more
            rooms[number] = promised_tokens(one.num_tokens + STEP_TOKENS)
        if number in rooms:
            relief.grown.append((one, min(rooms[number], one.num_wanted(max_tokens))))
    return relief


def may_want(one: Generation, max_tokens: int) -> bool:
    """False for most, at most steps: it has all the room that it could ask for."""
    reserved = one.num_reserved
    return reserved < one.num_tokens + STEP_TOKENS and reserved < one.num_wanted(max_tokens)


def _may_go(one: Generation) -> bool:
    if one.end is not None or one.is_leaving:
        return False
    return not one.offer.is_protected if one.epoch > 0 else not one.is_in_engine


def _num_more(one: Generation, num_reserved: int, num_tokens: int, max_tokens: int) -> int:
    """Blocks it takes to have room for so many tokens, or all it can come to have."""
    wanted = promised_tokens(min(num_tokens, one.num_wanted(max_tokens)))
    return max(wanted - promised_tokens(num_reserved), 0) // BLOCK_TOKENS
