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
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from kernels.steptimes import Floats, StepTimes

Mode = Literal["off", "fixed", "scheduled"]
Counts = npt.NDArray[np.int64]

_KEPT = 0.95  # of what was promised and came, from one verification to the next
_KEPT_OF_ALL = 0.995  # the same, over all requests
_DOUBT = 4.0  # drafts that a request's own record has to outweigh
_SURE, _LEAST = 0.995, 1e-9  # no draft is surer than that, or worth as little as one that cannot be verified
_NUM_RECENT = 8  # blocks that tell what a request's next one is worth
_NUM_OTHERS = 32  # blocks of any requests that tell the same of a new one
_PRIOR = 1.0  # blocks of its own that those count as
_REJOIN = 32  # steps until a request is drafted for again beside others
_SHARE = 0.02  # of the time goes into finding out whether the other way is better
_LEAST_SHARE = 3  # so many times it is halved, once for each try that changed nothing
_NUM_HELD = 4  # steps that go by one decision
_MOST_HELD = 16  # by one against drafting, or for all when so many steps before it were by such, too
_FEW = 0.25  # of the requests may be new then, and it still holds
_LEAST_GAIN = 1.0  # what a try without drafts is taken to cost at least, as a part of a step
_PATIENCE = 4  # as much rarer than new requests are other ones tried, and steps without drafts
_NUM_ROUNDS = 4  # at most, until the best speed is found
_SAME = 0.01  # as a part of it: near enough
_UNEVEN = (1.0, 1.5)  # what a step of uneven lengths may take, against an even one of as many rows
_LEARNED = 0.1  # of that, by each such step


class _Record:
    """How many verified drafts were right, and how many should have been by their confidences; older ones fade."""

    def __init__(self, right: float = 0.0, promised: float = 0.0) -> None:
        self.right, self.promised = right, promised

    def add(self, confidence: Sequence[float], num_right: int, kept: float) -> None:
        num_judged = min(num_right + 1, len(confidence))  # nothing is known of those behind a wrong one
        self.right = kept * self.right + num_right
        self.promised = kept * self.promised + sum(confidence[:num_judged])

    def correction(self, expected: float = 1.0) -> float:
        """What confidences are to be multiplied by; `expected` of one that nothing is known of."""
        return (self.right + _DOUBT * expected) / (self.promised + _DOUBT)


class _Blocks:
    """The calibrated confidences of the last few blocks: `values` [most, block], the first `num` of them filled."""

    def __init__(self, most: int, size: int) -> None:
        self.values: Floats = np.zeros((most, size))
        self.num = self._next = 0

    def add(self, block: Floats) -> None:
        self.values[self._next] = block
        self._next = (self._next + 1) % len(self.values)
        self.num = max(self.num, self._next or len(self.values))


class History:
    """What the drafts of one request came to lately: it moves with the request. `idle`: steps without a block;
    `is_chosen`: what was decided last, None before that."""

    def __init__(self) -> None:
        self.record, self.idle = _Record(), 0
        self.is_chosen: bool | None = None
        self.blocks: _Blocks | None = None

    def dump(self) -> list[float]:
        """Numbers that `load` makes it again of."""
        blocks = [] if self.blocks is None else self.blocks.values[: self.blocks.num].ravel().tolist()
        return [self.record.right, self.record.promised, float(self.idle), *blocks]

    @classmethod
    def load(cls, numbers: Sequence[float], size: int) -> History:
        """Raises ValueError when it is not what `dump` gives, with blocks of that `size`."""
        num, rest = divmod(len(numbers) - 3, size) if size else (0, len(numbers) - 3)
        if not 0 <= num <= _NUM_RECENT or rest or not all(0 <= one < 1e9 for one in numbers):
            raise ValueError("a history of drafts that is none")
        found = cls()
        found.record, found.idle = _Record(*numbers[:2]), int(numbers[2])
        for block in np.array(numbers[3:]).reshape(num, size):
            found.add(block)
        return found

    def add(self, block: Floats) -> None:
        if self.blocks is None:
            self.blocks = _Blocks(_NUM_RECENT, len(block))
        self.blocks.add(block)


def budget(survival: Floats, num_rows: int, draft_s: float, times: StepTimes, uneven: float = 1.0) -> tuple[int, float]:
    """How many drafts to verify beside the `num_rows` that are verified anyway, and the tokens a second that gives.

    survival: [drafts], descending; draft_s: what drafting took; uneven: what a step takes that verifies some of the
    drafts, against what `times` tell of as many rows. The first of equally good ones. Spec §8.3: the argmax of expected
    tokens times steps a second, here over all budgets.
    """
    tokens = num_rows + np.concatenate(([0.0], np.cumsum(survival)))
    steps_s = times.at(np.arange(num_rows, num_rows + len(tokens)))
    steps_s[1:-1] *= uneven
    speeds = tokens / (draft_s + steps_s)
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
    nearly: ClassVar[float] = 0.97
    """Of the best speed is enough to take all: which are left out is not known so well."""

    def __post_init__(self) -> None:
        self._size = len(self.temperatures)
        self._record, self._blocks = _Record(), _Blocks(_NUM_OTHERS, self._size)  # of all requests
        self._gain = 1.0  # speed of the last decision over that without drafts
        self._saved_s = 0.0  # for finding out
        self._is_whole = False  # drafts are verified whatever they promise
        self._num_held = 0  # steps since the last decision
        self._num_steady = -1  # steps by decisions for all, up to that one; -1 when it was none
        self._is_due = True  # for another one
        self._drafts = False  # it was for drafting for somebody, and so for who is new
        self._num_in_vain = 0  # tries since that changed
        self._uneven = 1.0  # as for `budget`: of late
        self._allowed = float(self._size)  # drafts of a block that could be verified, when all were
        self._is_sought = False  # how long a step takes that verifies all

    def choose(self, histories: Sequence[History], room: Sequence[int]) -> list[int]:
        """The requests to draft for, of those that a step feeds; `room`: the most drafts that each has room for."""
        able = [number for number, most in enumerate(room) if most > 0]
        if self.mode == "off" or not able:
            return []
        if self.mode == "fixed":
            return able
        self._num_held += 1
        is_steady = self._num_steady >= _MOST_HELD
        # Nobody is left of those decided for; of new ones the first block will tell.
        others = (histories[number] for number in able)
        is_other = all(one.is_chosen is None and not (is_steady and one.blocks is None) for one in others)
        most = _MOST_HELD if is_steady or not self._drafts else _NUM_HELD
        if self._is_due or is_other or self._num_held >= most:
            chosen = self._decide(histories, able)
        elif self._drafts:
            chosen = [number for number in able if histories[number].is_chosen is not False]  # and whoever is new
            self._is_whole &= self._num_held % _NUM_HELD > 0
        else:
            return []
        for number in able:
            histories[number].idle += 1
        num_new = 0
        for number in chosen:
            histories[number].idle = 0
            num_new += histories[number].blocks is None  # its first one is to be told by
        self._is_due |= num_new > (_FEW * len(able) if self._num_steady >= _MOST_HELD else 0)
        return chosen

    def _decide(self, histories: Sequence[History], able: list[int]) -> list[int]:
        num, full = len(histories), len(histories) + max(1, round(self._allowed * len(able)))
        num_held, self._num_held, self._is_due, self._is_whole = self._num_held, 0, True, False
        if not self.verify_times.knows(num):
            return []
        self._is_sought = not self.verify_times.knows(full)
        if self._is_sought or not self.draft_times.knows(len(able)):
            self._is_whole = True
            return able
        plain_s, full_s = self.verify_times.at(np.array([num, full])).tolist()
        row_s = (full_s - plain_s) / (full - num)
        drafts_s = self.draft_times.at(np.arange(1, len(able) + 1))
        best, speed = self._best([histories[number] for number in able], num, plain_s, row_s, drafts_s)
        self._gain = speed * plain_s / num
        self._saved_s += _SHARE / 2 ** min(self._num_in_vain, _LEAST_SHARE) * num_held * plain_s
        if bool(best) != self._drafts:
            self._drafts, self._num_in_vain = not self._drafts, 0
        new = [number for number in able if histories[number].blocks is None]
        worthy = {able[place] for place in best}
        rejoining = {number for number in able if histories[number].idle >= _REJOIN} if self._drafts else set()
        chosen = worthy.union(rejoining, new if self._drafts else ())
        for number in able:
            histories[number].is_chosen = number in chosen
        self._is_due = bool(rejoining - worthy)
        was_all, is_all = self._num_steady >= 0, self._drafts and len(chosen) == len(able)
        self._num_steady = (self._num_steady + num_held if was_all else 0) if is_all else -1
        if self._drafts:
            if self._tries(_PATIENCE * max(self._gain - 1.0, _LEAST_GAIN) * plain_s):
                return []
            return [number for number in able if number in chosen]
        tried, patience = (new, 1) if new else (able, _PATIENCE)
        more_s = float(drafts_s[len(tried) - 1]) + row_s * self._allowed * len(tried)
        self._is_whole = self._is_due = self._tries(patience * more_s)
        return tried if self._is_whole else []

    def admit(
        self, raw: Floats, lengths: Sequence[int], histories: Sequence[History], num_rows: int
    ) -> tuple[list[int], Floats]:
        """How many drafts to verify of each request drafted for, and their calibrated confidences [requests, block].

        raw: [requests, block] as drafted; lengths: how many of each may be verified; num_rows: requests of the step.
        """
        confidence = 0.5 + 0.5 * np.tanh(0.5 * raw / self.temperatures)  # the sigmoid
        confidence[np.isnan(confidence)] = 0.5
        np.maximum(confidence, _LEAST, out=confidence)
        if self.mode != "scheduled":
            return list(lengths), confidence
        worth = confidence
        if min(lengths) < self._size:  # those that cannot be verified are worth nothing
            worth = confidence * (np.arange(self._size) < np.array(lengths)[:, None])
        for history, block in zip(histories, worth, strict=True):
            history.add(block)
            self._blocks.add(block)
        if self._is_whole:
            self._allowed = sum(lengths) / len(lengths)
            return list(lengths), confidence
        flat = self.survival(worth, histories).ravel()
        order = np.argsort(-flat, kind="stable")  # of equals the earlier place: what is taken are prefixes
        order = order[: sum(lengths)]
        draft_s = float(self.draft_times.at(np.array([len(lengths)]))[0])
        num, speed = budget(flat[order], num_rows, draft_s, self.verify_times, self._uneven)
        whole_s = draft_s + float(self.verify_times.at(np.array([num_rows + len(order)]))[0])
        if (num_rows + float(flat.sum())) / whole_s >= self.nearly * speed:
            num = len(order)
        self._is_whole = num == len(order)  # until the next decision
        taken = np.bincount(order[:num] // self._size, minlength=len(lengths))
        return taken.tolist(), confidence

    def took(self, num_blocks: int, draft_s: float, lengths: Sequence[int], verify_s: float) -> None:
        """How long a step took that drafted so many blocks, and verified so many rows of each request."""
        if self.mode != "scheduled":
            return
        if num_blocks:
            self.draft_times.add(num_blocks, draft_s)
        if self._is_sought or min(lengths) == max(lengths):
            self.verify_times.add(sum(lengths), verify_s)
        else:
            ratio = verify_s / float(self.verify_times.at(np.array([sum(lengths)]))[0])
            low, high = _UNEVEN
            self._uneven += _LEARNED * (min(max(ratio, low), high) - self._uneven)

    def learn(self, history: History, confidence: Sequence[float], num_right: int) -> None:
        """So many of a request's verified drafts were right, of those with `confidence`."""
        if len(confidence):
            history.record.add(confidence, num_right, _KEPT)
            self._record.add(confidence, num_right, _KEPT_OF_ALL)

    def survival(self, confidence: Floats, histories: Sequence[History]) -> Floats:
        """How likely each draft is right, and all before it: of `confidence` [requests, block] as `admit` gave it."""
        return _survival(confidence, self._corrections(histories)[:, None])

    def _corrections(self, histories: Sequence[History]) -> Floats:
        expected = self._record.correction()
        return np.array([history.record.correction(expected) for history in histories])

    def _best(
        self, histories: Sequence[History], num_rows: int, plain_s: float, row_s: float, drafts_s: Floats
    ) -> tuple[list[int], float]:
        """Whom of `histories` drafting for gives the most tokens a second, in a step that takes `plain_s` for its
        `num_rows` without drafts, and those tokens. Nobody where that is as good.

        Time has the price of the best speed, in tokens: what is chosen at some price has a speed, which is the next
        price, until it is the same (Dinkelbach's method). The first is that of the last decision.
        """
        survivals = self._survivals(histories)
        plain = num_rows / plain_s
        speed = self._gain * plain
        for _ in range(_NUM_ROUNDS):
            price = self._uneven * speed * row_s
            tokens, rows = _above(*survivals, price)
            worths = tokens - price * rows
            order = np.argsort(-worths, kind="stable")
            num = int(np.argmax(np.cumsum(worths[order]) - speed * drafts_s)) + 1
            best = order[:num]
            took_s = drafts_s[num - 1] + self._uneven * (plain_s + row_s * rows[best].sum())
            found = (num_rows + tokens[best].sum()) / took_s
            before, speed = speed, max(float(found), plain)
            if abs(speed - before) < _SAME * before:
                break
        some = (num_rows + tokens.sum()) / (drafts_s[-1] + self._uneven * (plain_s + row_s * rows.sum()))
        tokens, rows = _above(*survivals, 0.0)
        whole = float(max(some, (num_rows + tokens.sum()) / (drafts_s[-1] + plain_s + row_s * rows.sum())))
        if max(found, whole) <= plain:
            return [], plain
        is_enough = whole > max(self.nearly * speed, plain)
        return (list(range(len(histories))) if is_enough else best.tolist()), max(speed, whole)

    def _survivals(self, histories: Sequence[History]) -> tuple[Floats, Counts, Floats]:
        """Of the last blocks of the requests that have some, [requests, blocks, places], the numbers of all requests'
        [requests], and of the last blocks of any [blocks, places]; before there are any, of a perfect one."""
        others = np.ones((1, self._size))
        if self._blocks.num:
            others = _survival(self._blocks.values[: self._blocks.num], self._record.correction())
        nums = np.array([0 if history.blocks is None else history.blocks.num for history in histories])
        known = [history for history in histories if history.blocks is not None]
        own = np.array([history.blocks.values for history in known if history.blocks is not None])
        own = own.reshape(-1, _NUM_RECENT, self._size)
        return _survival(own, self._corrections(known)[:, None, None]), nums, others

    def _tries(self, cost_s: float) -> bool:
        """Whether the other way is taken for once: when a share of the time of late pays for it."""
        if self._saved_s < cost_s:
            return False
        self._saved_s = 0.0
        self._num_in_vain += 1
        return True


def _above(own: Floats, nums: Counts, others: Floats, price: float) -> tuple[Floats, Floats]:
    """What a block of each request gives by `Scheduler._survivals`, where rows of more than a price are verified: the
    tokens to be expected of its drafts, and their rows; [requests]. Others' count while it has few of its own."""
    pays, pays_others = own > price, others > price
    found = np.empty((2, len(nums)))
    found[0], found[1] = (others * pays_others).sum(1).mean() * _PRIOR, pays_others.sum(1).mean() * _PRIOR
    known = nums > 0
    found[0, known] += (own * pays).sum((1, 2))
    found[1, known] += pays.sum((1, 2))
    found /= nums + _PRIOR
    return found[0], found[1]


def _survival(confidence: Floats, correction: Floats | float) -> Floats:
    """Products over the last axis, of corrected confidences."""
    return np.cumprod(np.minimum(confidence * correction, _SURE), -1, dtype=np.float64)
