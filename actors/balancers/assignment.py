"""Who gets what, each one thing, for the greatest sum."""

from __future__ import annotations

import numpy as np

from actors.balancers.copies import Ints


def assign(gains: Ints) -> Ints:
    """Which column each row gets, `[n]`, all different, for the greatest sum of `gains [n, n]`.

    The Hungarian method: row by row, each along a shortest augmenting path, at most n ** 2 vector operations.
    """
    n = len(gains)
    rows, columns = np.zeros(n, np.int64), np.zeros(n + 1, np.int64)  # prices; column n stands for the new row
    owner = np.full(n + 1, -1)
    for row in range(n):
        owner[n] = row
        column = n
        slack, seen = np.full(n, np.iinfo(np.int64).max), np.zeros(n + 1, np.bool_)
        back = np.zeros(n, np.int64)
        while owner[column] >= 0:
            seen[column] = True
            reduced = rows[owner[column]] - gains[owner[column]] - columns[:n]
            nearer = ~seen[:n] & (reduced < slack)
            slack[nearer], back[nearer] = reduced[nearer], column
            free = np.flatnonzero(~seen[:n])
            after = int(free[slack[free].argmin()])
            step = slack[after]
            rows[owner[seen]] -= step
            columns[seen] -= step
            slack[free] -= step
            column = after
        while column != n:
            owner[column] = owner[back[column]]
            column = back[column]
    return np.argsort(owner[:n])
