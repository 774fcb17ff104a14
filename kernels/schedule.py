"""Which requests a decode step drafts for, and how many of the drafts it verifies (spec §8.3). Free of torch.

Drafts are accepted while they are the tokens that the target samples, with the same noise (design §5): what is verified
changes how fast tokens come, never which. So nothing here has to be kept from what was sampled, and the best budget may
be looked for among all of them (spec §8.3 has to stop at the first that is no better).

A step is worth its tokens over its time. A draft's survival is the product of the calibrated confidences up to it, each
corrected by how often the request's own drafts were right lately. Verified are those of the greatest survival, as many
as give the most tokens a second by measured times. Whom to draft for has to be settled before there are confidences:
it is told by what each request's last blocks were worth beyond the price of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernels.steptimes import Floats, StepTimes

Mode = Literal["off", "fixed", "scheduled"]
Counts = npt.NDArray[np.int64]

PRICES: Floats = np.linspace(0.0, 0.8, 5)
"""Tokens that a row of verification may cost, at which `History.worth` is kept."""

_KEPT = 0.95  # of what was promised and came, from one verification to the next
_DOUBT = 4.0  # drafts that a request's own record has to outweigh
_SURE = 0.995  # no draft is surer than that
_NUM_RECENT = 8  # blocks that a request's worth is the mean of
_REJOIN = 32  # steps until a request is drafted for again beside others
_SHARE = 0.01  # of the time goes into finding out whether the other way is better
_LEAST_GAIN = 0.2  # what a try without drafts is taken to cost at least, as a part of a step
_FULL = 4  # one in so many of such drafts is verified whole


@dataclass(slots=True)
class History:
    """What the drafts of one request came to lately: it moves with the request.

    `right` of the drafts that were put to the target, and `promised`, how many should have been by their confidences;
    older ones count less. `worth` [prices]: what a block is worth above each of PRICES, None before the first one.
    `num_blocks`: how many that is the mean of, at most a few. `idle`: steps without a block.
    """

    right: float = 0.0
    promised: float = 0.0
    worth: Floats | None = None
    num_blocks: int = 0
    idle: int = 0

    @property
    def correction(self) -> float:
        """What the confidences are to be multiplied by."""
        return (self.right + _DOUBT) / (self.promised + _DOUBT)

    def learn(self, confidence: Floats, num_right: int) -> None:
        """Of verified drafts, `confidence` each [drafts], so many were right."""
        num_judged = min(num_right + 1, len(confidence))  # nothing is known of those behind a wrong one
        self.right = _KEPT * self.right + num_right
        self.promised = _KEPT * self.promised + float(confidence[:num_judged].sum())

    def dump(self) -> list[float]:
        """Numbers that `load` makes it again of."""
        worth = np.zeros(len(PRICES)) if self.worth is None else self.worth
        return [self.right, self.promised, float(self.num_blocks), float(self.idle), *worth.tolist()]

    @classmethod
    def load(cls, numbers: Sequence[float]) -> History:
        """Raises ValueError when it is not what `dump` gives."""
        if len(numbers) != 4 + len(PRICES) or not all(0 <= one < 1e9 for one in numbers):
            raise ValueError(f"a history of drafts of {numbers}")
        right, promised, num_blocks, idle, *worth = numbers
        return cls(right, promised, np.array(worth) if num_blocks else None, int(num_blocks), int(idle))


def budget(survival: Floats, num_rows: int, draft_s: float, times: StepTimes) -> tuple[int, float]:
    """How many drafts to verify beside the `num_rows` that are verified anyway, and the tokens a second that gives.

    survival: [drafts], descending; draft_s: what drafting took. The first of equally good ones. Spec §8.3: the argmax
    of expected tokens times steps a second, here over all budgets.
    """
    tokens = num_rows + np.concatenate(([0.0], np.cumsum(survival)))
    speeds = tokens / (draft_s + times.at(np.arange(num_rows, num_rows + len(tokens))))
    best = int(np.argmax(speeds))
    return best, float(speeds[best])


@dataclass
class Scheduler:
    """Of one engine. `temperatures` [block]: what raw confidences are divided by, place by place.

    A step asks `choose`, drafts for those, asks `admit`, verifies, and tells with `learn` how it came out.
    """

    mode: Mode
    temperatures: Floats
    verify_times: StepTimes = field(default_factory=StepTimes)
    draft_times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self._size = len(self.temperatures)
        # New requests are taken for as good as those before them, the first of all for perfect.
        self._typical: Floats = self._size * (1.0 - PRICES)
        self._gain = 1.0  # of the last steps over ones without drafts
        self._saved_s = 0.0  # for finding out
        self._num_tries = 0
        self._is_whole = False  # this step's drafts are verified whatever they promise

    def choose(self, histories: Sequence[History], room: Sequence[int]) -> list[int]:
        """The requests to draft for, of those that a step feeds; `room`: the most drafts that each has room for."""
        able = [number for number, most in enumerate(room) if most > 0]
        if self.mode == "off" or not able:
            return []
        if self.mode == "fixed":
            return able
        chosen = self._chosen(histories, able)
        for number in able:
            histories[number].idle += 1
        for number in chosen:
            histories[number].idle = 0
        return chosen

    def _chosen(self, histories: Sequence[History], able: list[int]) -> list[int]:
        num, full = len(histories), len(histories) + self._size * len(able)
        self._is_whole = False
        if not self.verify_times.knows(num):
            return []
        if not self.draft_times.knows(len(able)) or not self.verify_times.knows(full):
            self._is_whole = True
            return able
        plain_s, full_s = self.verify_times.at(np.array([num, full])).tolist()
        drafts_s = self.draft_times.at(np.arange(1, len(able) + 1))
        speed = self._gain * num / plain_s
        price = min(speed * (full_s - plain_s) / (full - num), 1.0)
        known = [self._typical if (worth := histories[number].worth) is None else worth for number in able]
        worths = _at_price(np.stack(known), price)
        order = np.argsort(-worths, kind="stable")
        gains = np.cumsum(worths[order]) - speed * drafts_s
        best = int(np.argmax(gains))
        self._saved_s += _SHARE * plain_s
        if gains[best] > 0:
            if self._tries(max(self._gain - 1.0, _LEAST_GAIN) * plain_s):
                return []
            chosen = {able[place] for place in order[: best + 1].tolist()}
            return sorted(chosen | {number for number in able if histories[number].idle >= _REJOIN})
        self._gain += (1.0 - self._gain) / _NUM_RECENT
        self._is_whole = self._num_tries % _FULL == 0
        if self._tries(float(drafts_s[-1]) + (full_s - plain_s if self._is_whole else 0.0)):
            return able
        self._is_whole = False
        return []

    def admit(
        self, raw: Floats, lengths: Sequence[int], histories: Sequence[History], num_rows: int
    ) -> tuple[list[int], Floats]:
        """How many drafts to verify of each request drafted for, and their calibrated confidences [requests, block].

        raw: [requests, block] as drafted; lengths: how many of each may be verified; num_rows: requests of the step.
        """
        confidence = _sigmoid(np.nan_to_num(raw) / self.temperatures)
        if self.mode != "scheduled":
            return list(lengths), confidence
        corrections = np.array([history.correction for history in histories])
        survival = np.cumprod(np.minimum(confidence * corrections[:, None], _SURE), 1, dtype=np.float64)
        survival[np.arange(self._size) >= np.array(lengths)[:, None]] = 0.0
        self._judge(survival, histories)
        if self._is_whole:
            return list(lengths), confidence
        flat = survival.ravel()
        order = np.argsort(-flat, kind="stable")  # of equals the earlier place: what is taken are prefixes
        order = order[: sum(lengths)]
        draft_s = float(self.draft_times.at(np.array([len(lengths)]))[0])
        num, speed = budget(flat[order], num_rows, draft_s, self.verify_times)
        plain_s = float(self.verify_times.at(np.array([num_rows]))[0])
        self._gain += (max(speed * plain_s / num_rows, 1.0) - self._gain) / _NUM_RECENT
        taken = np.bincount(order[:num] // self._size, minlength=len(lengths))
        return taken.tolist(), confidence

    def took(self, num_blocks: int, draft_s: float, num_rows: int, verify_s: float) -> None:
        """How long a step took that drafted so many blocks and verified so many rows."""
        if self.mode == "scheduled":
            self.verify_times.add(num_rows, verify_s)
            if num_blocks:
                self.draft_times.add(num_blocks, draft_s)

    def learn(self, history: History, confidence: Floats, num_right: int) -> None:
        """So many of a request's verified drafts were right, of `confidence` [drafts]."""
        if self.mode == "scheduled" and len(confidence):
            history.learn(confidence, num_right)

    def _judge(self, survival: Floats, histories: Sequence[History]) -> None:
        """What the blocks are worth: the tokens to be expected of their drafts, less the price of each."""
        worths = np.maximum(survival[:, :, None] - PRICES, 0.0).sum(1)
        for worth, history in zip(worths, histories, strict=True):
            history.num_blocks = min(history.num_blocks + 1, _NUM_RECENT)
            before = worth if history.worth is None else history.worth
            history.worth = before + (worth - before) / history.num_blocks
        self._typical += (worths.mean(0) - self._typical) / _NUM_RECENT

    def _tries(self, cost_s: float) -> bool:
        """Whether the other way is taken for once: when a share of the time of late pays for it."""
        if self._saved_s < cost_s:
            return False
        self._saved_s = 0.0
        self._num_tries += 1
        return True


def _at_price(worths: Floats, price: float) -> Floats:
    """Of `worths` [requests, prices] those at one price, along straight lines; 0 at price 1: [requests]."""
    place = price / (PRICES[1] - PRICES[0])
    low = min(int(place), len(PRICES) - 1)
    above = worths[:, low + 1] if low + 1 < len(PRICES) else np.zeros(len(worths))
    return np.asarray(worths[:, low] + (place - low) * (above - worths[:, low]), dtype=np.float64)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0))), dtype=np.float64)
