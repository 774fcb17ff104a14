"""The start-up sweep: dummy prompts that a replica computes first, so that it knows what work costs there."""

from __future__ import annotations

from dataclasses import dataclass

from actors.rules.cost import Terms, chunk_terms

_LARGEST = 512
"""Tokens of its longest step; an engine may take fewer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dummy prompt: the sizes of its chunks, each a step of its own."""

    chunks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks)

    def terms(self) -> list[Terms]:
        """Of each step."""
        found, done = [], 0
        for num_tokens in self.chunks:
            found.append(chunk_terms(num_tokens, done, self.num_tokens - done - num_tokens))
            done += num_tokens
        return found


def sweep(max_step_tokens: int, max_tokens: int) -> list[Prompt]:
    """The prompts, in order, for an engine that takes so many tokens a step, and requests so long; each to be computed
    alone, as a bounded prompt (`computing.measure`).

    At most 3,072 tokens together. They tell apart what steps, tokens, last windows and context cost: steps of all sizes
    behind nothing, and large and small ones behind much.
    """
    whole = max(1, min(max_step_tokens, max_tokens // 4, _LARGEST))
    half, quarter, eighth = (max(1, whole // part) for part in (2, 4, 8))
    plans = ((1,), (eighth,), (quarter,), (half,), (whole, whole, whole, half, quarter), (whole, 1))
    return [prompt for prompt in map(Prompt, plans) if prompt.num_tokens <= max_tokens]
