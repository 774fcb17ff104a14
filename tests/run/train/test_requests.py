"""Every task makes requests that the service takes, and the same ones from the same state."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

import run
from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from run.train.seeds import rng
from run.train.tasks import HELD_OUT, TASKS
from schemas.api import Protocol


@pytest.fixture(scope="module")
def converter() -> Converter:
    return Converter(ModelCard.from_folder(Path(run.__file__).parent / "models" / "shoal-tiny"))


@pytest.mark.parametrize("name", TASKS)
def test_requests_are_taken(name: str, converter: Converter) -> None:
    for index in range(30):
        for task in (TASKS[name], HELD_OUT[name]):
            made = task(rng("held-out", name, index), 200)
            body = {"model": converter.card.name, **made.request}
            draft = converter.read(Protocol.CHAT_COMPLETIONS, orjson.dumps(body))
            assert not draft.normal.ignored
            assert made.request["messages"][-1]["role"] in ("user", "tool") and made.answer["role"] == "assistant"
            assert made.answer["content"] or made.answer["tool_calls"]
            # The library gives a request that does not say so one or the other, and a thought would be lost.
            assert ("reasoning_content" in made.answer) == (made.request["thinking"] == {"type": "enabled"})


@pytest.mark.parametrize("name", TASKS)
def test_the_same_state_makes_the_same_example(name: str) -> None:
    made = [TASKS[name](rng("train", name, 7), 300) for _ in range(2)]
    assert made[0] == made[1] != TASKS[name](rng("train", name, 8), 300)
