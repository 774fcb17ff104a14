"""Bounded replay: decoder layers over the last window of a prompt only, and repair of lost window rows (spec §5).

Global KV of the decoder comes from one layer, the last KV owner, so a prompt needs the layers behind it for its last
window only. And a prefix whose compressed rows are cached needs its last window computed again, to have window rows.
Both truncate the sliding window where the replay starts, so both are approximations, which the model is trained for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.batch import Segment


@dataclass(frozen=True)
class Starts:
    """Where the computation of a request's state began, in tokens; all zero: nothing was left out, which is exact.

    `kept`: the compressed rows of that many tokens came from a cache; they are read and never written.
    `encoder`, `decoder`: the first token with window rows, in the layers before the last KV owner and from it on.
    `whole`: with fewer tokens than that the state lacks rows that generation needs.
    """

    kept: int = 0
    encoder: int = 0
    decoder: int = 0
    whole: int = 0


def after_prefix(num_tokens: int, window: int) -> Starts:
    """Encoder replay: `num_tokens` have compressed rows, and no window rows; their last window is computed again."""
    first = max(0, num_tokens - window)
    return Starts(kept=num_tokens, encoder=first, decoder=first, whole=num_tokens)


def for_prompt(starts: Starts, num_tokens: int, window: int) -> Starts:
    """Decoder replay: of a prompt of `num_tokens` the decoder computes the last window."""
    return Starts(starts.kept, starts.encoder, max(starts.decoder, num_tokens - window), num_tokens)


def decoder_segments(segments: Sequence[Segment], starts: Sequence[Starts], window: int) -> list[Segment] | None:
    """The parts of `segments` that decoder layers compute; None when those see just what encoder layers see."""
    if all(
        one.decoder == one.encoder or segment.start >= one.decoder + window - 1
        for segment, one in zip(segments, starts, strict=True)
    ):
        return None
    cut = []
    for segment, one in zip(segments, starts, strict=True):
        first = max(segment.start, one.decoder)
        if first < segment.end:
            cut.append(Segment(segment.slot, first, segment.end - first))
    return cut
