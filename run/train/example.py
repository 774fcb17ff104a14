"""One conversation with the answer that a good model gives: what every task makes and what `shoal eval` asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation with its answer.

    `request` is a body of OpenAI's chat completions without `model`: `messages` up to the last user or tool message
    (earlier assistant turns included), `tools`, `response_format`, `thinking` ({"type": "enabled"|"disabled"}, always
    given). `answer` is the assistant's message: `content`, and where there are any `reasoning_content`, `tool_calls`
    (as in OpenAI's messages). `skill` is the row of the table that it counts for; `depth` of recall: where in the note
    the fact is, 0 to 1. Images are data URLs of PNG in the messages.
    """

    skill: str
    request: dict[str, Any]
    answer: dict[str, Any]
    depth: float | None = None
