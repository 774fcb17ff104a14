"""Many block keys at once: as arrays, and each with the member that owns it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  # [n, 2]


def keys(data: bytes) -> Keys:
    """Keys as they travel, 16 bytes each -> [num, 2]. Raises ValueError for a part of one."""
    return np.frombuffer(data, dtype="<u8").reshape(-1, 2)


def owners(wanted: Keys, members: Sequence[str]) -> npt.NDArray[np.int64]:
    """For each key the number, in `members`, of the one that owns it: rendezvous hashing, as `owner.choose` does.

    The same on every node that knows the same members, in whatever order; when one joins or leaves, only its own keys
    move. Raises ValueError when there are no members.
    """
    if not members:
        raise ValueError("nobody to own these keys")
    order = sorted(range(len(members)), key=lambda number: members[number])
    seeds = [int.from_bytes(hashlib.blake2b(members[n].encode(), digest_size=8).digest(), "little") for n in order]
    weights = np.stack([_mix(wanted[:, 1] ^ np.uint64(seed)) for seed in seeds])
    chosen: npt.NDArray[np.int64] = np.array(order)[weights.argmax(0)]
    return chosen


def last_of_equal(many: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The place of each different key, of equal ones the last; and for each key, which of those it is equal to."""
    order = np.lexsort((many[:, 1], many[:, 0]))  # equal ones stay in order
    ordered = many[order]
    is_last = np.ones(len(many), dtype=np.bool_)
    is_last[:-1] = (ordered[1:, 0] != ordered[:-1, 0]) | (ordered[1:, 1] != ordered[:-1, 1])
    group = np.empty(len(many), dtype=np.int64)
    group[order] = np.cumsum(is_last) - is_last
    return order[is_last], group


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
