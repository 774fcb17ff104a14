"""Choosing a tool and filling its arguments from a request in plain words, and saying what a tool answered.

The tools are a fixed pool of twelve; a request offers two to four of them in any order. What is told apart is which of
them the words ask for, and which words are the arguments: names, texts and numbers are random. With thinking, the
thought names the tool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from run.train.example import Example
from run.train.words import CITIES, COLOURS, FOODS, NAMES, PLACES, THINGS

_SUMMARIES = ("sunny", "cloudy", "rainy", "windy", "foggy")
_LANGUAGES = ("French", "German", "Spanish", "Dutch")
_PAINTS = ("red", "green", "blue", "white")
_DIRECTIONS = ("left", "right", "up", "down")
_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def _one_of(values: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(COLOURS + THINGS + FOODS, k=rng.randint(2, 4)))


_ARGUMENTS: dict[str, Callable[[random.Random], Any]] = {
    "city": lambda rng: rng.choice(CITIES),
    "name": lambda rng: rng.choice(NAMES),
    "thing": lambda rng: rng.choice(THINGS),
    "food": lambda rng: rng.choice(FOODS),
    "place": lambda rng: rng.choice(PLACES),
    "colour": lambda rng: rng.choice(_PAINTS),
    "language": lambda rng: rng.choice(_LANGUAGES),
    "direction": lambda rng: rng.choice(_DIRECTIONS),
    "text": _text,
    "hour": lambda rng: rng.randint(0, 23),
    "minute": lambda rng: rng.randint(10, 59),
    "number": lambda rng: rng.randint(1, 99),
    "on": lambda rng: rng.random() < 0.5,
    "hot": lambda rng: rng.random() < 0.5,
}
_RESULTS: dict[str, Callable[[random.Random], Any]] = {
    "summary": lambda rng: rng.choice(_SUMMARIES),
    "degrees": lambda rng: rng.randint(1, 35),
    "time": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    "phone": lambda rng: rng.randint(1000, 9999),
    "price": lambda rng: rng.randint(1, 999),
    "translation": _text,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with the words that ask for it.

    `parameters` are its schemas by name, and the names are keys of `_ARGUMENTS`; `results` are keys of `_RESULTS`, and
    a tool without them answers that it is done. `asks` and `told`, the sentence about its result, are formats of both.
    """

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]
    asks: tuple[str, ...]
    told: str
    results: tuple[str, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as an entry of a request's `tools`."""
        parameters = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


POOL = (
    Tool(
        "get_weather",
        "The weather in a city",
        {"city": _STRING},
        ("What is the weather in {city}?", "How is the weather in {city}?"),
        "The weather in {city} is {summary}, with {degrees} degrees.",
        ("summary", "degrees"),
    ),
    Tool(
        "get_time",
        "The time in a city",
        {"city": _STRING},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        "The time in {city} is {time}.",
        ("time",),
    ),
    Tool(
        "get_price",
        "The price of a thing",
        {"thing": _STRING},
        ("What is the price of a {thing}?", "How much does a {thing} cost?"),
        "The price of a {thing} is {price}.",
        ("price",),
    ),
    Tool(
        "find_phone",
        "The phone of a person",
        {"name": _STRING},
        ("What is the phone of {name}?", "Find the phone of {name}."),
        "The phone of {name} is {phone}.",
        ("phone",),
    ),
    Tool(
        "translate",
        "Translate a text",
        {"text": _STRING, "language": _one_of(_LANGUAGES)},
        ("Translate into {language}: {text}", "How do you say this in {language}: {text}"),
        "In {language} it is: {translation}",
        ("translation",),
    ),
    Tool(
        "send_message",
        "Send a message",
        {"name": _STRING, "text": _STRING},
        ("Send a message to {name}: {text}", "Tell {name}: {text}"),
        "The message to {name} is sent.",
    ),
    Tool(
        "set_alarm",
        "Set an alarm",
        {"hour": _INTEGER, "minute": _INTEGER},
        ("Set an alarm at {hour}:{minute}.", "Wake me at {hour}:{minute}."),
        "The alarm at {hour}:{minute} is set.",
    ),
    Tool(
        "set_light",
        "Turn the light on or off",
        {"place": _STRING, "on": _BOOLEAN},
        ("Turn {on} the light in the {place}.", "Light {on} in the {place}, please."),
        "The light in the {place} is {on}.",
    ),
    Tool(
        "paint",
        "Paint a thing",
        {"thing": _STRING, "colour": _one_of(_PAINTS)},
        ("Paint the {thing} {colour}.", "Make the {thing} {colour}."),
        "The {thing} is now {colour}.",
    ),
    Tool(
        "order_food",
        "Order food",
        {"food": _STRING, "number": _INTEGER, "hot": _BOOLEAN},
        ("Order {number} {hot} {food} for me.", "I want {number} {hot} {food}."),
        "The order of {number} {hot} {food} is on its way.",
    ),
    Tool(
        "move_robot",
        "Move the robot",
        {"direction": _one_of(_DIRECTIONS), "number": _INTEGER},
        ("Move the robot {number} steps {direction}.", "Robot, go {direction} for {number} steps."),
        "The robot went {number} steps {direction}.",
    ),
    Tool(
        "buy",
        "Buy things",
        {"thing": _STRING, "number": _INTEGER, "colour": _STRING},
        ("Buy a {colour} {thing}, {number} times.", "I need {number} of the {colour} {thing}."),
        "You now have {number} of the {colour} {thing}.",
    ),
)
_SPOKEN = {"on": ("off", "on"), "hot": ("cold", "hot")}
_SYSTEMS = ("You are a helpful assistant.", "Use the tools.", "Be short.")
_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Hello, my name is {name}.", "Hello, {name}! What can I do for you?"),
    ("My {thing} is {colour}.", "Your {thing} is {colour}. What can I do for you?"),
    ("Thanks!", "You are welcome."),
    ("Thanks, {name}.", "You are welcome."),
)


def example(rng: random.Random, num_tokens: int) -> Example:
    """One request with tools, of a fixed size: in half of them one is to be called, in a third its result to be told,
    and the rest, a sixth, is talk that needs none of them."""
    tools = rng.sample(POOL, rng.randint(2, 4))
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    thinking = rng.random() < 0.15
    kind = rng.choice(("call", "call", "call", "result", "result", "talk"))
    if kind == "talk":
        question, content = rng.choice(_TALK)
        values = {key: _ARGUMENTS[key](rng) for key in ("name", "thing", "colour")}
        messages.append({"role": "user", "content": question.format(**values)})
        answer: dict[str, Any] = _said(content.format(**values))
        thought = "No tool is needed."
    else:
        tool = rng.choice(tools)
        arguments = {key: _ARGUMENTS[key](rng) for key in tool.parameters}
        messages.append({"role": "user", "content": rng.choice(tool.asks).format(**_spoken(arguments))})
        answer = _call(tool, arguments, rng)
        thought = f"The tool is {tool.name}."
        if kind == "result":
            results = {key: _RESULTS[key](rng) for key in tool.results}
            reasoning = {"reasoning_content": thought} if thinking else {}
            messages.append(answer | reasoning)
            call_id = answer["tool_calls"][0]["id"]
            content = json.dumps(results or {"done": True})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            answer = _said(tool.told.format(**_spoken(arguments | results)))
            thought = f"The tool {tool.name} answered."
    request: dict[str, Any] = {"messages": messages, "tools": [tool.schema for tool in tools]}
    request |= {"thinking": {"type": "enabled" if thinking else "disabled"}}
    return Example("tools", request, answer | ({"reasoning_content": thought} if thinking else {}))


def _call(tool: Tool, arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    function = {"name": tool.name, "arguments": json.dumps(arguments, separators=(",", ":"))}
    call = {"id": f"call_{rng.getrandbits(32):08x}", "type": "function", "function": function}
    return _said("") | {"tool_calls": [call]}


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _spoken(values: dict[str, Any]) -> dict[str, Any]:
    """The values as a sentence says them."""
    return {key: _SPOKEN[key][value] if key in _SPOKEN else value for key, value in values.items()}
