"""Whatever a grammar lets through to its end satisfies what was asked for; and what is refused, as it cannot be had."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from actors.recipe.calls import Tool
from actors.recipe.fields import Refusal
from actors.recipe.grammar import Asked, Grammars
from actors.rules.grammars import MAX_BYTES
from schemas.failure import Code
from tests.actors.constrained import (
    MARKS,
    accepts,
    followed,
    generate,
    grammars,
    object_schema,
    parsed,
    schema,
    text_of,
    with_definitions,
)

NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "60"))
"""NUM_SCHEMAS=1000 takes half a minute."""

BODY = {"messages": [{"role": "user", "content": "json"}], "thinking": {"type": "disabled"}}

# In the spirit of the public suite of draft 2020-12, keyword by keyword.
KEYWORDS: list[Any] = [
    True,
    {"type": "object", "properties": {"foo": {}, "bar": {}}, "required": ["bar", "baz"]},
    {"properties": {"foo": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"foo": False, "bar": True}},
    {"type": "object", "properties": {"__proto__": {"type": "number"}, "toString": {"maxLength": 2}}},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    {"allOf": [True, {"type": "integer", "maximum": 30}, {"minimum": 20}]},
    {"allOf": [{"properties": {"bar": {"type": "integer"}}, "required": ["bar"]}], "type": "object"},
    {"anyOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]},
    {"anyOf": [False, {"type": "string", "pattern": "^x"}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}]},
    {"const": {"foo": "bar", "baz": [None, False]}},
    {"const": 9007199254740992},
    {"enum": [6, "foo", [], True, {"foo": 12}]},
    {"enum": ["foo\nbar", "foo\rbar", "\u2028", "\\", "/"]},
    {"type": ["integer", "string", "null"]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "minItems": 1, "maxItems": 1, "uniqueItems": False},
    {"type": "number", "exclusiveMinimum": 1.1, "exclusiveMaximum": 3.0},
    {"type": "integer", "multipleOf": 7, "minimum": 14, "maximum": 21},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 9007199254740990, "maximum": 9007199254740991},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "pattern": "^\\S(|(.|\\n)*\\S)$"},
    {"type": "string", "pattern": "^[^0-9]{3}$", "description": "none"},
    {"type": "object", "patternProperties": {"f.*o": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c%25d"}, "c%d": {"type": "integer"}}},
    {"properties": {"foo": {"$ref": "#"}}, "additionalProperties": False, "type": "object"},
    {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {"type": "string", "minLength": 3}}},
    {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
    {"type": "string", "format": "unheard of", "default": 7, "$comment": "</think>", "foo": {"not": {}}},
]


def check_answer(whole: Any, seed: int) -> bool:
    """Whether an answer came to its end. Then it parses, and satisfies its schema."""
    chance = random.Random(seed)
    grammar = grammars().find(Asked(json=json.dumps(whole)))
    output = generate(followed().follow(grammar.text), chance)
    if output is None:
        return False
    text = text_of(output)
    Draft202012Validator(whole).validate(json.loads(text))
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": whole if isinstance(whole, dict) else {}}}
    assert parsed({**BODY, "response_format": told}, output)["content"] == text
    return True


def test_answers_satisfy_schemas_by_chance() -> None:
    ended = [check_answer(with_definitions(schema(random.Random(seed))), seed) for seed in range(NUM_SCHEMAS)]
    assert sum(ended) > 0.9 * NUM_SCHEMAS


def test_answers_satisfy_schemas_of_each_keyword() -> None:
    ended = [check_answer(whole, seed) for whole in KEYWORDS for seed in range(3)]
    assert sum(ended) > 0.9 * len(ended)


def test_arguments_satisfy_the_schemas_of_their_tools() -> None:
    """Through the official library: as a client gets them. A third of NUM_SCHEMAS, several tools each."""
    num_calls = 0
    for seed in range(NUM_SCHEMAS // 3):
        chance = random.Random(seed)
        schemas = dict(zip("fgh", [with_definitions(object_schema(chance)) for _ in range(3)], strict=True))
        thinks, must_call = chance.random() < 0.5, chance.random() < 0.7
        tools = tuple(Tool(name, json.dumps(one)) for name, one in schemas.items())
        asked = Asked(tools=tools, thinks=thinks, must_call=must_call, is_in_calls=must_call and not thinks)
        grammar = grammars().find(asked)
        assert not grammar.ignored
        output = generate(followed().follow(grammar.text), chance)
        if output is None:
            continue
        functions = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
        body: dict[str, Any] = {**BODY, "tools": functions}
        body["thinking"] = {"type": "enabled" if thinks else "disabled"}
        message = parsed({**body, "tool_choice": "required"} if asked.is_in_calls else body, output)
        calls = [call["function"] for call in message.get("tool_calls") or []]
        assert len(calls) == text_of(output).count("｜DSML｜ invoke name=")
        assert calls or not must_call
        for call in calls:
            Draft202012Validator(schemas[call["name"]]).validate(json.loads(call["arguments"]))
        num_calls += len(calls)
    assert num_calls > NUM_SCHEMAS // 8


ARGUMENTS: list[tuple[dict[str, Any], str, list[str], list[str]]] = [
    ({"type": "string"}, "true", ["", "a </b>\n\"q\\", "</", "</｜DSML"], []),
    ({"enum": ["re", "red", "re</x", 7]}, "true", ["re", "red", "re</x"], ["r", "redd", "7", "re</"]),
    ({"enum": ["re", 7]}, "false", ["7"], ["8", '"re"']),
    ({"type": ["string", "null"], "maxLength": 2}, "true", ["", "ab"], ["abc"]),
    ({"type": ["string", "null"]}, "false", ["null"], ['"null"', "1", ""]),
    ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}, "true", ["1"], [""]),
    ({"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}], "default": None}, "true", ["red"], ["null"]),
    ({"type": "string", "pattern": "^a+$"}, "false", ['"aa"'], ["aa", '"b"']),
    ({"type": "string", "format": "date"}, "false", ['"2026-11-30"'], ['"tomorrow"']),
    ({"type": "object", "properties": {"n": {"$ref": "#/$defs/c"}}}, "false", ['{"n": "red"}', "{}"], ['{"n": 1}']),
    ({}, "true", ["anything"], []),
    ({}, "false", ["[1, {}]"], ['"text"', "maybe"]),
]


@pytest.mark.parametrize(("argument", "kind", "good", "bad"), ARGUMENTS)
def test_how_an_argument_may_be_written(argument: dict[str, Any], kind: str, good: list[str], bad: list[str]) -> None:
    whole = {"type": "object", "properties": {"a": argument}, "required": ["a"], "$defs": {"c": {"enum": ["red"]}}}
    grammar = grammars().find(Asked(tools=(Tool("f", json.dumps(whole)),), is_in_calls=True)).text
    for value in [*good, *bad]:
        argument_text = f'<｜DSML｜ parameter name="a" string="{kind}">{value}</｜DSML｜ parameter>'
        call = f'<｜DSML｜ invoke name="f">\n{argument_text}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        assert accepts(grammar, call) is (value in good), value


def call(name: str, *keys: str) -> str:
    """A call with arguments of one character."""
    given = [f'<｜DSML｜ parameter name="{key}" string="true">x</｜DSML｜ parameter>' for key in keys]
    return f'<｜DSML｜ invoke name="{name}">\n' + "\n".join(given) + "\n</｜DSML｜ invoke>"


def test_which_arguments_a_call_may_have() -> None:
    text = {"type": "string"}
    named = {"properties": {"a": text, "b": text, "c c": text}, "required": ["b"]}
    tools = (
        Tool("f", json.dumps(named)),
        Tool("none", "{}"),
        Tool("open", json.dumps({"properties": {"a": text}, "additionalProperties": text, "required": ["z"]})),
    )
    grammar = grammars().find(Asked(tools=tools)).text
    for calls, is_good in {
        (call("f", "b"),): True,
        (call("f", "a", "b", "c\\u0020c"),): True,
        (call("f", "a", "b"), call("none"), call("f", "b")): True,
        (call("f"),): False,
        (call("f", "a"),): False,
        (call("f", "b", "a"),): False,
        (call("f", "b", "b"),): False,
        (call("f", "b", "d"),): False,
        (call("none", "a"),): False,
        (call("other"),): False,
        (call("open", "z"),): True,
        (call("open", "a", "z", "aa", "zz", "y"),): True,
        (call("open", "z", "a"),): False,
        (call("open", "z", 'q"'),): False,
        (): False,
    }.items():
        output = "Words.\n\n<｜DSML｜ calls>\n" + "\n".join(calls) + "\n</｜DSML｜ calls>"
        assert accepts(grammar, output) is is_good, calls
    assert accepts(grammar, "Only 1 < 2 words.\n")
    single = grammars().find(Asked(tools=tools, is_single=True, must_call=True)).text
    opened = "\n\n<｜DSML｜ calls>\n"
    assert accepts(single, opened + call("none") + "\n</｜DSML｜ calls>")
    assert not accepts(single, opened + call("none") + "\n" + call("none") + "\n</｜DSML｜ calls>")
    assert not accepts(single, "Words." + opened + call("none") + "\n</｜DSML｜ calls>")


def deep(num: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(num - 1)} if num else {}


HOSTILE: dict[str, tuple[Any, Code, str]] = {
    "nothing listed": ({"enum": []}, Code.BAD_REQUEST, "Unsatisfiable"),
    "lengths": ({"type": "string", "minLength": 3, "maxLength": 2}, Code.BAD_REQUEST, "Unsatisfiable"),
    "types": ({"allOf": [{"type": "string"}, {"type": "null"}]}, Code.BAD_REQUEST, "Unsatisfiable"),
    "no schema": ({"type": "object", "properties": {"a": 5}}, Code.BAD_REQUEST, "a schema is an object"),
    "no type": ({"type": "thing"}, Code.BAD_REQUEST, "Invalid type"),
    "no pattern": ({"type": "string", "pattern": "("}, Code.BAD_REQUEST, "unclosed"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, Code.UNSUPPORTED, "look-around"),
    "large pattern": ({"type": "string", "pattern": "a{99999999999}"}, Code.UNSUPPORTED, "a pattern: decimal"),
    "deep pattern": ({"type": "string", "pattern": "(" * 300 + ")" * 300}, Code.UNSUPPORTED, "a pattern: exceed"),
    "undecided": ({"format": "email", "pattern": "x{5000}", "type": "string"}, Code.UNSUPPORTED, "in common$"),
    "keyword": ({"not": {"type": "null"}}, Code.UNSUPPORTED, "not"),
    "keyword inside": ({"items": {"uniqueItems": True}}, Code.UNSUPPORTED, "uniqueItems"),
    "too many keys": ({"type": "object", "minProperties": 2}, Code.UNSUPPORTED, "minProperties"),
    "elsewhere": ({"$ref": "https://example.com/s"}, Code.UNSUPPORTED, "example.com"),
    "nowhere": ({"$ref": "#/$defs/a"}, Code.BAD_REQUEST, "names nothing"),
    "itself": ({"$ref": "#"}, Code.BAD_REQUEST, "has an end"),
    "endless": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, Code.BAD_REQUEST, "an end"),
    "endless list": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, Code.BAD_REQUEST, "has an end"),
    "deep": (deep(200), Code.UNSUPPORTED, "deep"),
    "deep value": (json.loads('{"const":' + "[" * 900 + "]" * 900 + "}"), Code.UNSUPPORTED, "recursion|deep"),
    "long": ({"enum": [f"value {n}" for n in range(8000)]}, Code.UNSUPPORTED, "bytes"),
    "wide": ({"properties": {f"p{n}": {} for n in range(700)}, "type": "object"}, Code.UNSUPPORTED, "row has"),
    "large bound": ({"type": "integer", "minimum": -(2**63)}, Code.UNSUPPORTED, "minimum -9223372036854775808 is not"),
    "large exclusive bound": ({"exclusiveMaximum": 2**53}, Code.UNSUPPORTED, "below 2\\^53"),
    "huge bound": ({"type": "number", "maximum": 1e30}, Code.UNSUPPORTED, "maximum 1e\\+30 is not supported"),
    "large step": ({"type": "integer", "multipleOf": 2**53}, Code.UNSUPPORTED, "multipleOf"),
    "large value": ({"const": {"a": [1, -(2**53) - 1]}}, Code.UNSUPPORTED, "-9007199254740993 in const"),
    "large listed": ({"anyOf": [{"enum": [9007199254740993]}]}, Code.UNSUPPORTED, "in enum"),
    "large size": ({"type": "string", "maxLength": 10**6 + 1}, Code.UNSUPPORTED, "maxLength 1000001 is not supported"),
    "huge size": ({"type": "array", "maxItems": 1e20}, Code.UNSUPPORTED, "maxItems"),
    "spelled": ({"const": "</think>"}, Code.UNSUPPORTED, "</think>"),
    "spelled by a pattern": ({"type": "string", "pattern": "^[ab]<[/]think>$"}, Code.UNSUPPORTED, "</think>"),
    "many ways": (
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(3)]} for i in range(12)]},
        Code.UNSUPPORTED,
        "too large",
    ),
}


def test_a_pattern_is_of_the_answer_as_the_client_gets_it() -> None:
    """Line breaks at the beginning are no part of that."""
    grammar = grammars().find(Asked(regex="\\s*a")).text
    assert [text for text in ("a", " \n a", "\na", "\n\n a") if accepts(grammar, text)] == ["a", " \n a"]
    assert parsed(BODY, generate(followed().follow(grammar), random.Random(1)) or [])["content"].endswith("a")
    deep = "(" * 999 + ")" * 999
    for pattern, code, part in ((r"\n+", Code.BAD_REQUEST, "Unsat"), (deep, Code.UNSUPPORTED, "a pattern: exceed")):
        with pytest.raises(Refusal, match=part) as refused:
            grammars().find(Asked(regex=pattern))
        assert refused.value.failure.code is code


@pytest.mark.parametrize("pattern", ["a</think>", "(x|y)</think>b", "(<[/]think>)?"])
def test_a_pattern_that_leads_into_a_control_sequence_is_refused(pattern: str) -> None:
    """An answer would come to where nothing is allowed any more."""
    with pytest.raises(Refusal, match="</think>' cannot be part of an answer") as refused:
        grammars().find(Asked(regex=pattern))
    assert refused.value.failure.code is Code.UNSUPPORTED
    assert grammars().find(Asked(regex="a</thin(k|g)>?")).text, "it may end before, or be another word"


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_had_is_refused_at_once(name: str) -> None:
    whole, code, part = HOSTILE[name]
    with pytest.raises(Refusal, match=part) as refused:
        grammars().find(Asked(json=json.dumps(whole), format_field="text.format"))
    assert (refused.value.failure.code, refused.value.failure.field) == (code, "text.format")
    with pytest.raises(Refusal):
        grammars().find(Asked(json=json.dumps(whole), format_field="text.format"))  # remembered


def test_the_last_ones_are_remembered_unless_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEPT": 2, "KEPT_BYTES": 30}.items():
        monkeypatch.setattr(f"actors.recipe.grammar.{name}", value)
    some, asked = Grammars(MARKS), [Asked(json=f'{{"const": "{letter}"}}') for letter in "abc"]
    for one in [*asked[:2], *asked[::2], long := Asked(json='{"const": "abcdefghijklmnopqrstuvwxyz"}')]:
        some.find(one)
    assert [*map(some.is_known, [*asked, long])] == [True, False, True, False]


def test_a_tool_that_cannot_be_kept_to_is_refused_or_ignored() -> None:
    good, bad = Tool("good", '{"properties": {"a": {"type": "integer"}}}'), Tool("bad", '{"not": {}}')
    found = grammars().find(Asked(tools=(good, bad), tools_field="tools[].x"))
    assert found.ignored == ("tools[].x",)
    assert 'name=\\"a\\"' in found.text and "T1_TRUE" in found.text
    for asked in (Asked(tools=(good, bad._replace(is_strict=True))), Asked(tools=(good, bad), must_call=True)):
        with pytest.raises(Refusal, match="bad") as refused:
            grammars().find(asked)
        assert refused.value.failure.code is Code.UNSUPPORTED
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False, "type": "object"}
    whole = Tool("tree", json.dumps({"$ref": "#/$defs/node", "$defs": {"node": node}}))  # as classes are described
    assert 'name=\\"next\\"' in grammars().find(Asked(tools=(whole,), must_call=True)).text
    enums = {"properties": {"a": {"enum": [f"value {n}" for n in range(5000)]}}}
    large = tuple(Tool(f"t{n}", json.dumps(enums)) for n in range(3))
    found = grammars().find(Asked(tools=(*large, good)))
    assert len(found.text.encode()) <= MAX_BYTES and found.ignored == ("tools",)
    assert 'name=\\"a\\" string=\\"false\\"' in found.text
