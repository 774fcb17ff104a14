"""Where an answer's tokens stand in the conversation already: what heads are guided to while they learn to look up."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

_LONGEST = 6
_FEW = 2


def sources(tokens: npt.NDArray[np.uint16], targets: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """For each place of a conversation [n] whose next token is a target: an earlier place, or this one, of that token.

    Of several the one whose tokens before it agree longest with those up to here, the latest of equals. -1 where the
    next token is no target or stands nowhere; also where it stands in more than a few places, and none agrees.
    """
    found = np.full(len(tokens), -1, np.int64)
    seen: defaultdict[int, list[int]] = defaultdict(list)
    ids = tokens.tolist()
    for place, token in enumerate(ids):
        if place and targets[place]:
            found[place - 1] = _best(ids, place, seen[token])
        seen[token].append(place)
    return found


def _best(ids: list[int], place: int, candidates: list[int]) -> int:
    best, longest = -1, 1 if len(candidates) > _FEW else 0
    for candidate in candidates[-64:]:
        length = 0
        while length < min(_LONGEST, candidate) and ids[candidate - 1 - length] == ids[place - 1 - length]:
            length += 1
        if length >= longest:
            best, longest = candidate, length
    return best
