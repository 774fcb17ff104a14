"""The requests a decode replica generates for: what they emitted, when they end, what can still be asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs
from opentelemetry.trace import Span

from actors.decode.blocks import Filling
from actors.decode.grammar import Grammar
from actors.decode.outputs import OutputLength
from actors.rules.emission import Held, resend_answer
from actors.rules.load import STEP_TOKENS, DecodeLoad, expected_output, promised_room, promised_tokens
from actors.rules.logprobs import KeptLogprobs, message_of
from kernels.constraint import Logprobs
from kernels.engine import BLOCK_TOKENS, Sampling
from schemas.handover import HandOver
from schemas.request import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    LastWord,
    Preempted,
    Resend,
    TokenLogprobs,
    TokensEmitted,
)

RETENTION_S = 30.0
"""How long an ended request can still be asked for (the entrypoint may have missed the end)."""


@dataclass(slots=True, eq=False)
class Generation:
    """One request here. `epoch` is 0 until the entrypoint has confirmed the claim.

    `tokens` are those of its output that were made here, behind the offer's; `num_computed` of them are in the engine's
    caches: all but the one sampled last. `num_reserved`: tokens of room it has, or will have when it is in the engine.
    `num_told`: of its output, those that its entrypoint was told of; `last_word`: what it is told behind the others.
    `grammar` says what its tokens may be, None for anything. `filling` is None when nothing is to be stored of it,
    `logprobs` when it did not ask. `is_leaving`: it has taken part in its last step here, and is to go on elsewhere.
    """

    offer: HandOver
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: KeptLogprobs | None = None
    num_told: int = field(init=False)
    last_word: LastWord | None = None
    num_computed: int = 0
    num_reserved: int = 0
    is_in_engine: bool = False
    is_leaving: bool = False
    grammar: Grammar | None = None
    filling: Filling | None = None
    span: Span | None = None
    end: LastWord | None = None
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self.logprobs = KeptLogprobs.of(self.offer.sampling)
        self.num_told = self.offer.num_output

    @property
    def id(self) -> str:
        return self.offer.request_id

    @property
    def is_running(self) -> bool:
        """It takes part in steps: it is claimed, has not ended, and does not leave."""
        return self.epoch > 0 and self.end is None and not self.is_leaving

    @property
    def trouble(self) -> str:
        """Why it cannot go on, where that is for its grammar to say."""
        error = "" if self.grammar is None else self.grammar.error
        return f"the output cannot be kept to what was asked for: {error}" if error else ""

    @property
    def sampling(self) -> Sampling:
        """What the engine is told."""
        asked = self.offer.sampling
        return Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            first_end=self.num_prompt_tokens + self.offer.limits.min_tokens,
            top_logprobs=asked.top_logprobs,
            logit_bias=asked.logit_bias,
            top_k=asked.top_k,
            min_p=asked.min_p,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt as its client gave it."""
        return self.offer.num_tokens - self.offer.num_output

    @property
    def num_tokens(self) -> int:
        """Of its prompt and its output so far."""
        return self.offer.num_tokens + len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens of its output so far, with those from before it came here: the index of the next one."""
        return self.offer.num_output + len(self.tokens)

    def num_wanted(self, max_tokens: int) -> int:
        """Tokens that it can come to have: the prompt and the longest output, or all that the engine takes of one."""
        return min(self.num_prompt_tokens + self.offer.limits.max_tokens, max_tokens)

    def num_at_first(self, max_tokens: int) -> int:
        """Tokens of room that it begins with: for its next step; for all if it is never to make way."""
        wanted = self.num_wanted(max_tokens)
        return wanted if self.offer.is_protected else min(promised_tokens(self.num_tokens + STEP_TOKENS), wanted)

    def advance(self, new: Sequence[int], eos_token: int, max_tokens: int) -> list[int]:
        """Take one step's tokens. Those to emit: none from the end-of-sequence token on, none beyond a limit.

        `max_tokens` is the engine's for prompt plus output; `limits.max_tokens` the request's own for its output.
        """
        room = min(self.offer.limits.max_tokens - self.num_output, max_tokens - self.num_tokens)
        if len(new) < room and eos_token not in new:
            self.num_computed = len(self.tokens) + len(new) - 1
            self.tokens.extend(new)
            return list(new)
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

    def hand_over(self, *, is_whole: bool = True) -> HandOver:
        """What goes with its state to who goes on with it; where that is, and whose it becomes, is still the old.
        `is_whole`: none of its blocks was lost, so those to come are of use."""
        chain = self.filling.chain_end(self.tokens) if self.filling is not None and is_whole else None
        moved = {"num_tokens": self.num_tokens, "num_output": self.num_output, "chain": chain}
        return structs.replace(self.offer, epoch=self.epoch, **moved)

    def add_logprobs(self, found: Sequence[Logprobs], num_emitted: int) -> None:
        """What the engine said of the tokens of a step, as far as they were emitted: to be sent with them."""
        assert self.logprobs is not None  # the engine raises otherwise
        self.logprobs.add(self.num_output - num_emitted, message_of(found[:num_emitted]))

    def untold(self) -> tuple[int, list[int], TokenLogprobs | None]:
        """(index of the first, tokens, logprobs if it asked) of what is to be told. It counts as told from now on."""
        first, end = self.num_told, self.num_output
        self.num_told = end
        logprobs = None if self.logprobs is None or first == end else self.logprobs.get(first, end)
        return first, self.tokens[first - self.offer.num_output :], logprobs


class Slots:
    """Arriving and running requests of one replica, and those that ended lately. Times are seconds.

    Room is counted when a request arrives, before its state is pulled: as far as outputs are expected to go
    (`promised_room`). What is reserved in the engine is less, and grows with it (`pressure.py`). `max_tokens` is the
    longest prompt plus output.
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
        generation.num_reserved = generation.num_at_first(self.max_tokens)
        whole = promised_tokens(generation.num_wanted(self.max_tokens))
        if max(whole, self.promised_tokens + self._promised(generation)) > self.capacity_tokens:
            return None
        self._here[generation.id] = generation
        return generation

    def running(self) -> list[Generation]:
        """Those that take part in steps, in order of arrival."""
        return [g for g in self._here.values() if g.is_running]

    def over(self) -> list[Generation]:
        """Those that have ended, and are here still."""
        return [g for g in self._here.values() if g.end is not None]

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
            if not isinstance(generation.end, Failed | Preempted):
                self.outputs.add(generation.num_output)
            generation.ended_s = now_s
            generation.grammar = None  # megabytes, of no use to who asks
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
            start = generation.offer.num_output
            return Held(generation.epoch, generation.tokens, generation.end, generation.logprobs, start)

        return resend_answer(source, resend, find)

    @property
    def num_tokens(self) -> int:
        """Tokens held now."""
        return sum(g.num_tokens for g in self._here.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks reserved for nobody, as the engine counts them: what is about to be in it has its own, too."""
        num_reserved = sum(promised_tokens(g.num_reserved) for g in self._here.values())
        return (self.capacity_tokens - num_reserved) // BLOCK_TOKENS

    @property
    def promised_tokens(self) -> int:
        """Room counted for all that are here (`promised_room`)."""
        return sum(map(self._promised, self._here.values()))

    def load(self) -> DecodeLoad:
        """What balancers are told."""
        mean = self.outputs.mean
        to_come = sum(
            expected_output(mean, max(g.num_wanted(self.max_tokens) - g.num_tokens, 0))
            for g in self._here.values()
            if g.end is None
        )
        return DecodeLoad(self.promised_tokens, mean, self.max_tokens, self.num_tokens + to_come)

    def _promised(self, generation: Generation) -> int:
        num_tokens, is_whole = generation.num_tokens, generation.offer.is_protected
        num_left, reserved = max(generation.num_wanted(self.max_tokens) - num_tokens, 0), generation.num_reserved
        return promised_room(num_tokens, num_left, self.outputs.mean, is_whole=is_whole, num_reserved=reserved)
