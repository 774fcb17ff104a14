"""The requests a decode replica generates for: what they emitted, when they end, what can still be asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actors.decode.blocks import Filling
from actors.decode.outputs import OutputLength
from actors.rules.emission import Held, resend_answer
from actors.rules.load import DecodeLoad, expected_output, promised_tokens
from actors.rules.logprobs import KeptLogprobs, message_of
from kernels.constraint import Logprobs
from kernels.engine import Sampling
from schemas.handover import HandOver
from schemas.request import (
    Cancelled,
    End,
    Failed,
    Finished,
    FinishReason,
    Resend,
    TokenLogprobs,
    TokensEmitted,
)

RETENTION_S = 30.0
"""How long an ended request can still be asked for (the entrypoint may have missed the end)."""


@dataclass(slots=True, eq=False)
class Generation:
    """One request here. `epoch` is 0 until the entrypoint has confirmed the claim.

    `num_computed` of its tokens are in the engine's caches: all but the one sampled last. `filling` is None when
    nothing is to be stored of it. `logprobs` is None when it did not ask.
    """

    offer: HandOver
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: KeptLogprobs | None = None
    num_computed: int = 0
    filling: Filling | None = None
    end: End | None = None
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self.logprobs = KeptLogprobs.of(self.offer.sampling)

    @property
    def id(self) -> str:
        return self.offer.request_id

    @property
    def sampling(self) -> Sampling:
        """What the engine is told."""
        asked, first_end = self.offer.sampling, self.offer.num_tokens + self.offer.limits.min_tokens
        return Sampling(asked.temperature, asked.top_p, asked.seed, first_end, asked.top_logprobs, asked.logit_bias)

    def num_wanted(self, max_tokens: int) -> int:
        """Tokens to set room aside for: the prompt and the longest output, or all that the engine takes of one."""
        return min(self.offer.num_tokens + self.offer.limits.max_tokens, max_tokens)

    def advance(self, new: Sequence[int], eos_token: int, max_tokens: int) -> list[int]:
        """Take one step's tokens. Those to emit: none from the end-of-sequence token on, none beyond a limit.

        `max_tokens` is the engine's for prompt plus output; `limits.max_tokens` the request's own for its output.
        """
        room = min(self.offer.limits.max_tokens, max_tokens - self.offer.num_tokens) - len(self.tokens)
        emitted: list[int] = []
        for token in new:
            if token == eos_token:
                self.end = Finished(reason=FinishReason.STOP)
                break
            emitted.append(token)
            if len(emitted) >= room:
                self.end = Finished(reason=FinishReason.LENGTH)
                break
        self.num_computed = min(len(self.tokens) + len(new) - 1, len(self.tokens) + len(emitted))
        self.tokens.extend(emitted)
        return emitted

    def told(self, found: Sequence[Logprobs], num_emitted: int) -> TokenLogprobs:
        """What the engine said of the tokens of a step, as far as they were emitted: to be sent with them."""
        assert self.logprobs is not None  # the engine raises otherwise
        logprobs = message_of(found[:num_emitted])
        self.logprobs.add(len(self.tokens) - num_emitted, logprobs)
        return logprobs


class Slots:
    """Arriving and running requests of one replica, and those that ended lately. Times are seconds.

    Room is set aside when a request arrives, before its state is pulled, for its whole output: so a request that is
    here never has to make way for another one's growth. `max_tokens` is the longest prompt plus output.
    """

    def __init__(self, num_slots: int, capacity_tokens: int, max_tokens: int) -> None:
        self.num_slots = num_slots
        self.capacity_tokens = capacity_tokens
        self.max_tokens = max_tokens
        self.outputs = OutputLength()
        self._here: dict[str, Generation] = {}
        self._ended: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._here.values()))

    def arrive(self, offer: HandOver) -> Generation | None:
        """Hold a slot, and room, for a request on offer. None when there is not enough, or it is here already."""
        if len(self._here) >= self.num_slots or offer.request_id in self._here:
            return None
        generation = Generation(offer)
        if self.reserved_tokens + self._promised(generation) > self.capacity_tokens:
            return None
        self._here[generation.id] = generation
        return generation

    def running(self) -> list[Generation]:
        """Those that are claimed and not ended, in order of arrival."""
        return [g for g in self._here.values() if g.epoch > 0 and g.end is None]

    def cancel(self, request_id: str, epoch: int = 0) -> bool:
        """End a request at the next step's border; with an epoch, only if held under that or an earlier one.

        False if it is not here, or has ended.
        """
        generation = self._here.get(request_id)
        if generation is None or generation.end is not None:
            return False
        if epoch and (generation.epoch or generation.offer.epoch) > epoch:
            return False
        generation.end = Cancelled()
        return True

    def leave(self, generation: Generation, now_s: float) -> None:
        """It has ended, or was not to stay: its slot is free. Idempotent."""
        if self._here.get(generation.id) is not generation:
            return
        del self._here[generation.id]
        if generation.epoch > 0:
            if not isinstance(generation.end, Failed):
                self.outputs.add(len(generation.tokens))
            generation.ended_s = now_s
            self._ended.pop(generation.id, None)
            self._ended[generation.id] = generation
        while self._ended and now_s - next(iter(self._ended.values())).ended_s > RETENTION_S:
            del self._ended[next(iter(self._ended))]  # the first ended first

    def resend(self, source: str, resend: Resend) -> TokensEmitted:
        """What an entrypoint missed."""

        def find(request_id: str) -> Held | None:
            generation = self._here.get(request_id) or self._ended.get(request_id)
            if generation is None:
                return None
            return Held(generation.epoch, generation.tokens, generation.end, generation.logprobs)

        return resend_answer(source, resend, find)

    @property
    def num_tokens(self) -> int:
        """Tokens held now."""
        return sum(g.offer.num_tokens + len(g.tokens) for g in self._here.values())

    @property
    def reserved_tokens(self) -> int:
        """Room set aside, as the engine counts it: for what is in it, and for what is about to be."""
        return sum(map(self._promised, self._here.values()))

    def load(self) -> DecodeLoad:
        """What balancers are told."""
        mean = self.outputs.mean
        to_come = sum(
            expected_output(mean, max(g.num_wanted(self.max_tokens) - g.offer.num_tokens - len(g.tokens), 0))
            for g in self._here.values()
            if g.end is None
        )
        return DecodeLoad(self.reserved_tokens, mean, self.max_tokens, self.num_tokens + to_come)

    def _promised(self, generation: Generation) -> int:
        return promised_tokens(generation.num_wanted(self.max_tokens))
