"""Fields of a short text as JSON: to a schema, or those that the request names.

A schema stands in the system message exactly as the official template prints a `response_format`: the service refuses
that field as long as it enforces no constraints, and a model that has learnt the text will know it from the field too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from run.train.example import Example
from run.train.words import CITIES, COLOURS, FOODS, JOBS, NAMES, PLACES, THINGS

FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_PRICE = {"type": "object", "properties": {"food": _STRING, "price": _INTEGER}, "required": ["food", "price"]}
_MOST_FIELDS = 4
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Field:
    """A key with its schema, its values, and how sentences say one."""

    key: str
    schema: dict[str, Any]
    value: Callable[[random.Random], Any]
    says: Callable[[Any], tuple[str, ...]]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _prices(rng: random.Random) -> list[dict[str, Any]]:
    return [{"food": food, "price": rng.randint(1, 99)} for food in rng.sample(FOODS, rng.randint(1, 3))]


def _say_prices(prices: list[dict[str, Any]]) -> tuple[str, ...]:
    return ("The prices are " + ", ".join(f"{price['food']} {price['price']}" for price in prices) + ".",)


FIELDS = (
    Field("name", _STRING, lambda r: r.choice(NAMES), lambda v: (f"The name is {v}.", f"My name is {v}.")),
    Field("age", _INTEGER, lambda r: r.randint(1, 99), lambda v: (f"The age is {v}.", f"I am {v} years old.")),
    Field("city", _STRING, lambda r: r.choice(CITIES), lambda v: (f"The city is {v}.", f"I live in {v}.")),
    Field("job", _STRING, lambda r: r.choice(JOBS), lambda v: (f"The job is {v}.", f"I work as {v}.")),
    Field("thing", _STRING, lambda r: r.choice(THINGS), lambda v: (f"The thing is {v}.", f"I want the {v}.")),
    Field("colour", _STRING, lambda r: r.choice(COLOURS), lambda v: (f"The colour is {v}.", f"It should be {v}.")),
    Field("number", _INTEGER, lambda r: r.randint(1, 99), lambda v: (f"The number is {v}.", f"I need {v} of them.")),
    Field("price", _INTEGER, lambda r: r.randint(1, 999), lambda v: (f"The price is {v}.", f"It costs {v}.")),
    Field("place", _STRING, lambda r: r.choice(PLACES), lambda v: (f"The place is {v}.", f"We meet in the {v}.")),
    Field("hour", _INTEGER, lambda r: r.randint(0, 23), lambda v: (f"The hour is {v}.", f"We meet at {v}.")),
    Field("paid", _BOOLEAN, lambda r: r.random() < 0.5, lambda v: ("It is paid." if v else "It is not paid.",)),
    Field("open", _BOOLEAN, lambda r: r.random() < 0.5, lambda v: ("It is open." if v else "It is not open.",)),
    Field(
        "foods",
        {"type": "array", "items": _STRING},
        lambda r: r.sample(FOODS, r.randint(1, 4)),
        lambda v: (f"The foods are {_listed(v)}.", f"We eat {_listed(v)}."),
    ),
    Field("prices", {"type": "array", "items": _PRICE}, _prices, _say_prices),
)


def example(rng: random.Random, num_tokens: int) -> Example:
    """One text of one to six sentences, of which one to four fields are wanted, in any order."""
    wanted = rng.sample(FIELDS, rng.randint(1, _MOST_FIELDS))
    others = rng.sample([field for field in FIELDS if field not in wanted], rng.randint(0, _MOST_OTHERS))
    told = [(field, field.value(rng)) for field in wanted + others]
    sentences = [rng.choice(field.says(value)) for field, value in told]
    rng.shuffle(sentences)
    keys = [field.key for field in wanted]
    form = rng.choice(("schema", "schema", "object", "words"))
    what = "as JSON" if form == "schema" else f"{_listed(keys)} as JSON"
    content = rng.choice(("Extract {}: {}", "Give me {}: {}")).format(what, " ".join(sentences))
    messages = [{"role": "user", "content": content}]
    if form != "words":
        schema = schema_of(wanted) if form == "schema" else {"type": "json_object"}
        system = rng.choice(("", "", "", "You are a helpful assistant.")) + FORMAT + json.dumps(schema)
        messages.insert(0, {"role": "system", "content": system})
    values = {field.key: value for field, value in told[: len(wanted)]}
    answer = {"role": "assistant", "content": json.dumps(values)}
    thinking = rng.random() < 0.1
    if thinking:
        answer["reasoning_content"] = f"The fields are {_listed(keys)}."
    request = {"messages": messages, "thinking": {"type": "enabled" if thinking else "disabled"}}
    return Example("json", request, answer)


def schema_of(fields: list[Field]) -> dict[str, Any]:
    """The schema of an object with these fields, in this order, all of them required."""
    properties = {field.key: field.schema for field in fields}
    return {"type": "object", "properties": properties, "required": list(properties)}
