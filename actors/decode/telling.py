"""What a decode replica says of its requests to their entrypoints, in the order of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

from actors.decode.slots import Generation
from actors.rules.outbox import Outbox
from kernels.engine import Engine
from schemas.request import TokensEmitted

BACKLOG_TOKENS = 4096
"""No more steps are made for an entrypoint that so many tokens wait for. Logprobs are kept of as many."""

PACE_S = 0.002
"""Between two batches to one entrypoint, at least. A step takes longer, and what it gives goes out at once; what a
faster engine gives is gathered."""


class Telling:
    """What steps gave waits here, by entrypoint, until its window is open: then all of it goes out, each request's in
    one piece. While an entrypoint keeps up that is at once.

    An outbox for a courier. `on_last_word` is called when a request ended without a step, and there is that to send.
    """

    def __init__(self, source: str, on_last_word: Callable[[], None]) -> None:
        self._outbox = Outbox(source)
        self._on_last_word = on_last_word
        self._untold: dict[str, dict[Generation, None]] = {}
        self._num_waiting: dict[str, int] = {}

    def step(self, generation: Generation, new: list[int], engine: Engine) -> None:
        """A step gave it these."""
        emitted = generation.advance(new, engine.info.eos_token, engine.info.max_tokens)
        if generation.logprobs is not None:
            generation.add_logprobs(engine.logprobs(generation.id), len(emitted))
        generation.last_word = generation.end
        self._wait(generation, len(emitted))

    def last_word(self, generation: Generation) -> None:
        """Its end, behind all that it was given before."""
        generation.last_word = generation.end
        self._wait(generation, 0)
        self._on_last_word()

    def _wait(self, generation: Generation, num_tokens: int) -> None:
        entrypoint = generation.offer.entrypoint
        if entrypoint not in self._untold:
            self._untold[entrypoint], self._num_waiting[entrypoint] = {}, 0
        self._untold[entrypoint][generation] = None
        self._num_waiting[entrypoint] += 1 + num_tokens

    def may_send(self, now_s: float) -> bool:
        """Whether something waits that could go out."""
        return any(map(self._outbox.may_send, self._untold, repeat(now_s)))

    def take(self, now_s: float) -> list[tuple[str, TokensEmitted]]:
        """(entrypoint, message) to send now."""
        for entrypoint in [one for one in self._untold if self._outbox.may_send(one, now_s)]:
            for one in self._untold.pop(entrypoint):
                first, tokens, logprobs = one.untold()
                self._outbox.add(entrypoint, one.id, one.epoch, first, tokens, one.last_word, logprobs=logprobs)
            del self._num_waiting[entrypoint]
        return self._outbox.take(now_s)

    def taken(self, entrypoint: str, now_s: float) -> None:
        """A receipt came in."""
        self._outbox.taken(entrypoint, now_s)

    def drop(self, entrypoint: str) -> None:
        """It is gone, and what waits for it is of no use. Idempotent."""
        self._untold.pop(entrypoint, None)
        self._num_waiting.pop(entrypoint, None)
        self._outbox.drop(entrypoint)

    def is_idle(self, now_s: float) -> bool:
        """Nothing waits, and what was sent was taken."""
        return not self._untold and self._outbox.is_idle(now_s)

    def is_backlogged(self, entrypoint: str) -> bool:
        """So much waits for it that its requests should."""
        return self._num_waiting.get(entrypoint, 0) > BACKLOG_TOKENS


@dataclass(slots=True)
class Totals:
    """Since the start: requests in all steps, the tokens they got, and how many made way; now: who waits for room."""

    num_rows: int = 0
    num_new: int = 0
    num_preempted: int = 0
    num_waiting: int = 0

    def step(self, new: Sequence[Sequence[int]]) -> None:
        """One that gave each request these."""
        self.num_rows += len(new)
        self.num_new += sum(map(len, new))

    def detail(self, num_verified: int) -> dict[str, float]:
        """For a load report; `num_verified` rows were computed for drafts and what they follow."""
        detail = {"preempted": float(self.num_preempted), "waiting_for_room": float(self.num_waiting)}
        if self.num_rows:
            detail["accepted_length"] = round(self.num_new / self.num_rows, 2)
            detail["verified_per_token"] = round(num_verified / max(self.num_new, 1), 2)
        return detail
