"""One request as its client sees it, and what is said of it to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.recipe.submission import Submission
from run.simulate.chaos.grammar import grammar
from run.simulate.chaos.script import Ask
from run.simulate.chaos.truth import Answer
from schemas.bulk import Payload
from schemas.request import End, Limits, Sampling, Submit
from schemas.vision import Image


@dataclass(slots=True, eq=False)
class Call:
    """`is_ours`: the client ended it, or gave its shard up, without being told. `submission`: there is none before its
    images are known."""

    ask: Ask
    answer: Answer
    begun_s: float
    heard_s: float
    submission: Submission | None = None
    shard: str = ""
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    ended_s: float = 0.0
    is_ours: bool = False
    is_cancelled: bool = False
    is_placing: bool = False
    is_resending: bool = False
    is_behind: bool = False
    is_judged: bool = False

    @property
    def deadline_ns(self) -> int:
        """0 for none."""
        return int((self.begun_s + self.ask.deadline_s) * 1e9) if self.ask.deadline_s else 0

    @property
    def sent_as(self) -> str:
        """The id that its shard knows it by."""
        return self.submission.id if self.submission else self.ask.id

    def submit(self, recipe: str, prompt: bytes, images: list[Image]) -> None:
        """It is for some shard now."""
        ask = self.ask
        submit = Submit(
            request_id=ask.id,
            recipe=recipe,
            tenant=ask.tenant,
            prompt=Payload(),
            num_prompt_tokens=len(prompt) // 4,
            sampling=Sampling(
                temperature=ask.temperature,
                top_p=1.0,
                seed=ask.seed,
                top_logprobs=ask.top_logprobs,
                grammar=grammar(ask.grammar),
            ),
            limits=Limits(max_tokens=ask.max_tokens, deadline_ns=self.deadline_ns),
            images=images,
            exact=ask.is_exact,
            cache=f"tenant:{ask.tenant}",
        )
        self.submission = Submission(submit, prompt)

    def move(self, now_s: float) -> bool:
        """Its shard is lost: it is for another one, or was so too often."""
        if not self.is_placing and (self.submission is None or not self.submission.move()):
            return False
        self.shard, self.heard_s, self.is_behind = "", now_s, False
        return True

    def emitted(self, tokens: list[int]) -> None:
        """These came, behind all that came before."""
        self.tokens += tokens
        if self.submission is not None:
            self.submission.emitted(tokens)
