"""JSON answers: their fields are those of the schema, in its order, and their values are said in the text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import deepseek_recipe as library
import orjson

import run
from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from run.train.seeds import rng
from run.train.tasks.extraction import FIELDS, FORMAT, example, schema_of
from schemas.api import Protocol

TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


def test_answers_are_what_the_schema_wants_of_the_text() -> None:
    forms = set()
    for index in range(300):
        made = example(rng("train", "extraction", index), 0)
        system = made.request["messages"][0]["content"] if len(made.request["messages"]) == 2 else ""
        schema = json.loads(system.partition(FORMAT)[2] or '{"type": "json_object"}')
        asked, answer = made.request["messages"][-1]["content"], json.loads(made.answer["content"])
        assert made.answer["content"] == json.dumps(answer)
        if schema["type"] == "object":
            _check(answer, schema)
        else:
            named = re.findall(r"\w+", asked.partition(" as JSON")[0])
            assert list(answer) == [word for word in named if word not in ("Extract", "Give", "me", "and")]
        for word in _words(answer):
            assert word in asked
        forms.add((bool(system), schema["type"]))
    assert forms == {(False, "json_object"), (True, "json_object"), (True, "object")}


def _check(value: Any, schema: dict[str, Any]) -> None:
    assert type(value) is TYPES[schema["type"]]
    if isinstance(value, dict):
        assert list(value) == schema["required"] == list(schema["properties"])
        for key, inner in value.items():
            _check(inner, schema["properties"][key])
    for inner in value if isinstance(value, list) else ():
        _check(inner, schema["items"])


def _words(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [word for inner in (value.values() if isinstance(value, dict) else value) for word in _words(inner)]
    return [] if isinstance(value, bool) else [str(value)]


def test_a_schema_is_printed_as_the_template_prints_a_response_format() -> None:
    converter = Converter(ModelCard.from_folder(Path(run.__file__).parent / "models" / "shoal-tiny"))
    schema = schema_of([FIELDS[0], FIELDS[-1]])
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "As JSON."}]}
    spelt = dict(body, model="shoal-tiny", messages=[{"role": "system", "content": FORMAT + json.dumps(schema)}])
    spelt["messages"] += body["messages"]
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for kind in ("enabled", "disabled"):
        thinking = {"thinking": {"type": kind}}
        official = library.ChatCompletionRequest(body | thinking).convert(library.ConversionOptions())
        prompt = library.DeepseekV41Encoding().render_conversation(official.conversation).prompt
        read = converter.read(Protocol.CHAT_COMPLETIONS, orjson.dumps(spelt | thinking)).request
        assert library.DeepseekV41Encoding().render_conversation(read.conversation).prompt == prompt
