"""What a decode replica says of its requests to their entrypoints, in the order of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actors.decode.slots import Generation
from actors.rules.outbox import Outbox
from kernels.engine import Engine
from schemas.request import LastWord, TokenLogprobs


class Said(NamedTuple):
    """What a step gave a request, `tokens` from the index `first` on: for the outbox, while the next step runs."""

    generation: Generation
    first: int
    tokens: list[int]
    end: LastWord | None
    logprobs: TokenLogprobs | None


class Telling:
    """`said` waits until `speak`, which puts it into the outbox; then it goes out as its entrypoint's window allows."""

    def __init__(self, outbox: Outbox) -> None:
        self.said: list[Said] = []
        self._outbox = outbox

    def step(self, generation: Generation, new: list[int], engine: Engine) -> None:
        """A step gave it these."""
        first, logprobs = generation.num_output, None
        emitted = generation.advance(new, engine.info.eos_token, engine.info.max_tokens)
        if generation.logprobs is not None:
            logprobs = generation.told(engine.logprobs(generation.id), len(emitted))
        self.said.append(Said(generation, first, emitted, generation.end, logprobs))

    def speak(self) -> None:
        """What steps gave goes into the outbox, in their order."""
        said, self.said = self.said, []
        for generation, first, tokens, end, logprobs in said:
            offer = generation.offer
            self._outbox.add(
                offer.entrypoint, offer.request_id, generation.epoch, first, tokens, end, logprobs=logprobs
            )

    def last_word(self, generation: Generation) -> None:
        """Its end, behind all that was said before."""
        self.speak()
        first, epoch = generation.num_output, generation.epoch
        self._outbox.add(generation.offer.entrypoint, generation.id, epoch, first, [], generation.end)


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
