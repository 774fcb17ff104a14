"""An example's tokens are the service's prompt and the turn that the official library would print; targets are all that
an assistant says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

import run
from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from run.train.example import Example
from run.train.rendering import Renderer, Sample
from run.train.seeds import rng
from run.train.tasks import TASKS
from schemas.api import Protocol

TINY = Path(run.__file__).parent / "models" / "shoal-tiny"
TEXT = Tokenizer.from_file(str(TINY / "tokenizer.json"))
OFF, ON = {"type": "disabled"}, {"type": "enabled"}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TINY)


@pytest.fixture(scope="module")
def converter() -> Converter:
    return Converter(ModelCard.from_folder(TINY))


def read(converter: Converter, request: dict[str, Any]) -> list[int]:
    body = orjson.dumps({"model": converter.card.name, **request})
    tokens: list[int] = converter.read(Protocol.CHAT_COMPLETIONS, body).tokens.tolist()
    return tokens


def said(sample: Sample) -> str:
    return TEXT.decode(sample.tokens[sample.targets].tolist(), skip_special_tokens=False)


def call(index: int, name: str, /, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{index}", "type": "function", "function": function}


def after(example: Example) -> dict[str, Any]:
    """The request of the next turn: the answer is history in it."""
    calls = example.answer.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    messages = [*example.request["messages"], example.answer, *(results or [{"role": "user", "content": "More."}])]
    return example.request | {"messages": messages}


@pytest.mark.parametrize("name", [name for name in TASKS if name != "picture"])
def test_an_answer_is_what_the_library_makes_of_it_in_history(
    name: str, renderer: Renderer, converter: Converter
) -> None:
    for index in range(10):
        example = TASKS[name](rng("train", name, index), 200)
        if example.request["thinking"] == OFF or "tools" in example.request:  # others lose their thought in history
            tokens = renderer.render(example).tokens.tolist()
            assert read(converter, after(example))[: len(tokens)] == tokens


def test_calls_of_any_kind_are_spelt_as_the_library_spells_them(renderer: Renderer, converter: Converter) -> None:
    calls = [call(1, "find"), call(2, "find", text='a "b" é', number=-3, list=[1, {"a": None}], yes=True)]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": calls}
    request = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "thinking": ON}
    example = Example("tools", request, answer)
    tokens = renderer.render(example).tokens.tolist()
    assert read(converter, after(example))[: len(tokens)] == tokens


def test_targets_are_all_that_assistants_say(renderer: Renderer, converter: Converter) -> None:
    turns = [("user", "Repeat: a"), ("assistant", "a"), ("user", "Repeat: <｜Assistant｜>")]
    request = {"messages": [{"role": role, "content": content} for role, content in turns], "thinking": ON}
    example = Example("transform", request, {"role": "assistant", "content": "b", "reasoning_content": "So: b"})
    sample = renderer.render(example)
    prompt = read(converter, request)
    assert sample.tokens[: len(prompt)].tolist() == prompt
    assert said(sample) == "a<｜end▁of▁sentence｜>So: b</think>b<｜end▁of▁sentence｜>"
    assert sample.targets[len(prompt) :].all() and not sample.targets[len(prompt) - 1]


def test_images_stand_where_their_tokens_begin(renderer: Renderer) -> None:
    image_token = TEXT.token_to_id("<｜image｜>")
    for index in range(5):
        sample = renderer.render(TASKS["picture"](rng("train", "picture", index), 0))
        ((start, pixels),) = sample.images
        rows, columns = (-(-side // (14 * 3)) for side in pixels.shape[:2])
        num_tokens = rows * (columns + 1) + 2
        assert pixels.shape[2] == 3
        assert (sample.tokens == image_token).nonzero()[0].tolist() == list(range(start, start + num_tokens))
