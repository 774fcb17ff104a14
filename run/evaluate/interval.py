"""How far a share of a few tries can be from the true one."""

from __future__ import annotations

from math import sqrt

_Z = 1.959964  # of 95 %


def wilson(num_right: int, num: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % for `num_right` of `num` tries; (0, 1) of none."""
    if not num:
        return 0.0, 1.0
    share, extra = num_right / num, _Z**2 / num
    middle = (share + extra / 2) / (1 + extra)
    reach = _Z * sqrt(share * (1 - share) / num + extra / (4 * num)) / (1 + extra)
    return max(0.0, middle - reach), min(1.0, middle + reach)
