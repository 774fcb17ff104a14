"""The form of an answer, from a body of any protocol to the grammar that goes along with the request."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actors.recipe.converter import Converter, Prepared
from actors.recipe.fields import Refusal
from actors.recipe.session import Session
from actors.rules.grammars import unspelt_of
from schemas.api import Protocol
from schemas.failure import Code
from schemas.request import FinishReason
from tests.actors.bodies import CHAT, ID, MESSAGES, RESPONSES, body, prepare
from tests.actors.constrained import MARKS, text_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
BAD = {"not": {}}
THINK = {"thinking": {"type": "enabled"}}
EFFORT = {"reasoning": {"effort": "high"}}


def chat_tool(schema: Any = SCHEMA, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def responses_tool(schema: Any = SCHEMA, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": schema, **more}


def messages_tool(schema: Any = SCHEMA, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": schema, **more}


TOOLS: dict[Protocol, Any] = {CHAT: chat_tool, RESPONSES: responses_tool, MESSAGES: messages_tool}
FIELDS = {CHAT: "tools[].function.parameters", RESPONSES: "tools[].parameters", MESSAGES: "tools[].input_schema"}
THINKING: dict[Protocol, Any] = {CHAT: THINK, RESPONSES: EFFORT, MESSAGES: THINK}


def told(schema: Any, name: str = "x", **more: Any) -> dict[Protocol, dict[str, Any]]:
    """A schema of the answer, in each protocol."""
    return {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": name, "schema": schema, **more}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }


FORMAT = {CHAT: "response_format", RESPONSES: "text.format", MESSAGES: "output_config.format"}


def text(prepared: Prepared) -> str:
    """Of its prompt."""
    return text_of(np.frombuffer(prepared.prompt, dtype="<u4").tolist())


def refused(converter: Converter, protocol: Protocol, **fields: Any) -> tuple[Code, str, str]:
    with pytest.raises(Refusal) as refusal:
        prepare(converter, protocol, "json", **fields)
    failure = refusal.value.failure
    return failure.code, failure.field, failure.message


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_a_schema_of_the_answer(converter: Converter, protocol: Protocol) -> None:
    prepared = prepare(converter, protocol, "Hi", **told(SCHEMA)[protocol])
    grammar = prepared.sampling.grammar
    assert '"required": ["a"]' in grammar
    assert unspelt_of(grammar) == [MARKS.think_end]
    assert f"<[{MARKS.think_end}]>" not in grammar
    assert prepared.ignored == []
    assert "## Response Format:" in text(prepared)
    assert '"required": ["a"]' in text(prepared)
    thinking = prepare(converter, protocol, "Hi", **told(SCHEMA)[protocol], **THINKING[protocol])
    assert f"<[{MARKS.think_end}]> answer" in thinking.sampling.grammar
    assert refused(converter, protocol, **told(BAD)[protocol])[:2] == (Code.UNSUPPORTED, FORMAT[protocol])
    assert refused(converter, protocol, **told({"enum": []})[protocol])[:2] == (Code.BAD_REQUEST, FORMAT[protocol])


def test_any_object_and_patterns(converter: Converter) -> None:
    for protocol, fields in (
        (CHAT, {"response_format": {"type": "json_object"}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    ):
        assert '"type": "object"}' in prepare(converter, protocol, "json", **fields).sampling.grammar
    assert "/[0-9]+/" in prepare(converter, CHAT, response_format={"type": "regex", "regex": r"^\d+$"}).sampling.grammar
    code, field, message = refused(converter, CHAT, response_format={"type": "regex", "regex": "(?=a)"})
    assert (code, field) == (Code.UNSUPPORTED, "response_format") and "look-ahead" in message
    begun = [{"role": "user", "content": "json"}, {"role": "assistant", "content": "{", "prefix": True}]
    assert refused(converter, CHAT, messages=begun, **told(SCHEMA)[CHAT])[1] == "response_format"
    assert refused(converter, MESSAGES, output_config={"format": {"type": "xml"}})[1] == "output_config.format"
    odd = {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}
    assert refused(converter, MESSAGES, output_config=odd)[1] == "output_config.format.strict"


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_tools_are_called_as_their_schemas_say(converter: Converter, protocol: Protocol) -> None:
    tool = TOOLS[protocol]
    prepared = prepare(converter, protocol, tools=[tool(), tool(name="g")])
    grammar = prepared.sampling.grammar
    assert unspelt_of(grammar) == list(MARKS)
    assert "answer: text | " in grammar and 'invoke name=\\"g\\"' in grammar and " d call)*" in grammar
    assert prepare(converter, protocol, tools=[tool()], tool_choice=choice(protocol, "none")).sampling.grammar == ""
    loose = prepare(converter, protocol, tools=[tool(BAD | {"type": "object"}), tool(name="g")])
    assert loose.ignored == [FIELDS[protocol]]
    assert 'parameter name=\\"a\\"' in loose.sampling.grammar
    strict = tool({"type": "object", **BAD}, "g", strict=True)
    code, field, message = refused(converter, protocol, tools=[tool(), strict])
    assert (code, field) == (Code.UNSUPPORTED, FIELDS[protocol].replace("[]", "[1]"))
    assert "'g'" in message and "not is not supported" in message


# As the SDKs describe a class that has a part which may be missing, or a list of them.
PART = {"type": "object", "properties": {"z": {"type": "string", "maxLength": 5}}, "required": ["z"]}
CLASS: dict[str, Any] = {
    "$defs": {"Part": PART},
    "type": "object",
    "properties": {
        "one": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]},
        "all": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 1},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["one", "all", "kind"],
}


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_strict_is_the_schema_and_no_other_keys(converter: Converter, protocol: Protocol) -> None:
    """The library would have rewritten it, without lengths and definitions, or refused it."""
    fields = {"tools": [TOOLS[protocol](CLASS, strict=True)], "tool_choice": choice(protocol, "required")}
    call = prepare(converter, protocol, **fields, **THINKING[protocol]).sampling.grammar
    answer = prepare(converter, protocol, **told(CLASS, strict=True)[protocol]).sampling.grammar
    for grammar in (call, answer):
        assert '"maxLength": 5' in grammar and '"minItems": 1' in grammar
        assert '"required": ["z"], "additionalProperties": false' in grammar
    assert '"additionalProperties"' not in prepare(converter, CHAT, **told(CLASS)[CHAT]).sampling.grammar
    assert "strict must be true or false" in refused(converter, CHAT, **told(CLASS, strict=7)[CHAT])[2]


def test_a_response_says_what_it_was_asked_for(converter: Converter) -> None:
    space = {"type": "namespace", "name": "ns", "description": "S", "tools": [responses_tool(SCHEMA, strict=True)]}
    fields = {"tools": [responses_tool(SCHEMA, "g", strict=True), space], **told(SCHEMA, strict=True)[RESPONSES]}
    prepared = prepare(converter, RESPONSES, **fields)
    assert 'invoke name=\\"ns::f\\"' in prepared.sampling.grammar
    session = Session(converter, prepared, ID, 0)
    body = json.loads(session.finish(FinishReason.STOP, 0)[0])
    assert body["text"]["format"]["strict"] is True
    assert body["tools"][0]["strict"] is True
    bad = {**space, "tools": [responses_tool({"type": "object", **BAD}, strict=True)]}
    assert "ns::f" in refused(converter, RESPONSES, tools=[bad])[2]


def choice(protocol: Protocol, name: str, **more: Any) -> Any:
    """`auto`, `none`, `required`, or that of a tool."""
    if name in ("auto", "none", "required"):
        return {"type": name.replace("required", "any"), **more} if protocol is MESSAGES else name
    if protocol is CHAT:
        return {"type": "function", "function": {"name": name}}
    return {"type": "tool" if protocol is MESSAGES else "function", "name": name, **more}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_a_tool_has_to_be_called(converter: Converter, protocol: Protocol, thinks: bool) -> None:
    tool = TOOLS[protocol]
    fields = {"tools": [tool(), tool(name="g")], **(THINKING[protocol] if thinks else {})}
    for name, others in (("required", True), ("g", False)):
        prepared = prepare(converter, protocol, tool_choice=choice(protocol, name), **fields)
        grammar = prepared.sampling.grammar
        assert "text" not in grammar.partition("\n\n")[0].replace("text:", "")
        assert ('invoke name=\\"f\\"' in grammar) is others
        assert ('"name": "f"' in text(prepared)) is others
        opens = text(prepared).endswith("｜DSML｜ calls>\n")
        assert opens is not ("calls>" in grammar.partition("section:")[0])
        assert not (opens and thinks)
    bad = tool({"type": "object", **BAD})
    code, field, message = refused(converter, protocol, tools=[tool(), bad], tool_choice=choice(protocol, "required"))
    assert code in (Code.UNSUPPORTED, Code.BAD_REQUEST)
    more = THINKING[protocol] if thinks else {}
    for name, tools in (("unknown", [tool()]), ("required", []), ("required", None), ("f", [])):
        why = refused(converter, protocol, tools=tools, tool_choice=choice(protocol, name), **more)
        assert why[:2] == (Code.BAD_REQUEST, "tool_choice")
    assert prepare(converter, protocol, tool_choice=choice(protocol, "auto")).sampling.grammar == ""


@pytest.mark.parametrize("more", [{}, EFFORT])
def test_a_tool_of_a_namespace_is_called_by_its_whole_name(converter: Converter, more: dict[str, Any]) -> None:
    tools = [responses_tool(), responses_tool(name="g")]
    space = {"type": "namespace", "name": "ns", "description": "S", "tools": tools}
    named = prepare(converter, RESPONSES, tools=[space], tool_choice=choice(RESPONSES, "ns::g"), **more)
    assert 'invoke name=\\"ns::g\\"' in named.sampling.grammar and "ns::f" not in named.sampling.grammar
    assert refused(converter, RESPONSES, tools=[space], tool_choice=choice(RESPONSES, "g"), **more)[1] == "tool_choice"


def test_what_would_be_lost_of_a_format_is_refused(converter: Converter) -> None:
    kinds: list[tuple[Any, Code, str]] = [
        ({"type": "xml"}, Code.UNSUPPORTED, ""),
        ({"type": "json_object", "schema": SCHEMA}, Code.BAD_REQUEST, ".schema"),
        ({"type": "regex", "regex": ""}, Code.BAD_REQUEST, ""),
        ({"type": "regex", "regex": "a", "flags": "i"}, Code.BAD_REQUEST, ".flags"),
        ({"type": "json_schema"}, Code.BAD_REQUEST, ""),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, Code.BAD_REQUEST, ""),
        ({"type": "text", "json_schema": {"schema": SCHEMA}}, Code.BAD_REQUEST, ".json_schema"),
        (7, Code.UNSUPPORTED, ""),
    ]
    for format, code, within in kinds:
        assert refused(converter, CHAT, response_format=format)[:2] == (code, "response_format" + within)
    odd = told(SCHEMA, odd=1)
    assert refused(converter, CHAT, **odd[CHAT])[1] == "response_format.json_schema.odd"
    assert refused(converter, RESPONSES, **odd[RESPONSES])[1] == "text.format.odd"
    assert refused(converter, RESPONSES, text={"format": {"type": "json_schema", "name": "x"}})[1] == "text.format"
    assert refused(converter, RESPONSES, text={"odd": 1})[1] == "text.odd"
    assert refused(converter, MESSAGES, output_config={"odd": 1})[1] == "output_config.odd"
    described = told(SCHEMA, description="D", strict=None)
    assert prepare(converter, CHAT, **described[CHAT]).ignored == ["response_format.json_schema.description"]
    assert prepare(converter, RESPONSES, **described[RESPONSES]).ignored == ["text.format.description"]


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_what_the_library_refuses_names_the_field(converter: Converter, protocol: Protocol) -> None:
    tool = TOOLS[protocol]
    assert refused(converter, protocol, tools=[tool({"type": "string"})])[1] == "tools"
    assert refused(converter, protocol, tools=[tool(), tool()])[1] == "tools"
    assert refused(converter, protocol, tools=[tool(name="a b")])[1].startswith("tools[0].")
    assert refused(converter, protocol, temperature=7)[1] == "temperature"
    assert refused(converter, protocol, **told({"minimum": "x"})[protocol])[1] == FORMAT[protocol]


def test_one_call_at_most(converter: Converter) -> None:
    for protocol, fields in (
        (CHAT, {"parallel_tool_calls": False}),
        (RESPONSES, {"parallel_tool_calls": False}),
        (MESSAGES, {"tool_choice": choice(MESSAGES, "auto", disable_parallel_tool_use=True)}),
        (MESSAGES, {"tool_choice": choice(MESSAGES, "required", disable_parallel_tool_use=True), **THINK}),
    ):
        assert " d call)*" not in prepare(converter, protocol, tools=[TOOLS[protocol]()], **fields).sampling.grammar


def test_a_format_beside_tools(converter: Converter) -> None:
    """Either: JSON as asked for, or calls."""
    for fields in (told(SCHEMA)[CHAT], {"response_format": {"type": "json_object"}}):
        grammar = prepare(converter, CHAT, "json", tools=[chat_tool()], **fields).sampling.grammar
        assert "answer: format | " in grammar
        assert "text:" not in grammar
    messages = prepare(converter, MESSAGES, tools=[messages_tool()], **told(SCHEMA)[MESSAGES])
    assert "answer: format | " in messages.sampling.grammar
    assert "Response Format" in text(messages) and "Available Tool Schemas" in text(messages)


def test_a_conversation_that_is_told_a_schema_is_else_the_same(converter: Converter) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "b"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "c"}]},
    ]
    fields = {"messages": history, "system": "S", "tools": [messages_tool()], "max_tokens": 9, **THINK}
    plain = text(prepare(converter, MESSAGES, **fields))
    asked = text(prepare(converter, MESSAGES, **fields, **told(SCHEMA)[MESSAGES]))
    begin = asked.index("\n\n## Response Format:")
    assert asked[:begin] + asked[asked.index("<｜User｜>", begin) :] == plain


def test_a_grammar_is_tried_once(converter: Converter) -> None:
    schema = {"type": "object", "properties": {"only here": {"type": "null"}}}
    raw = json.dumps(body(CHAT, "Hi", **told(schema)[CHAT])).encode()
    draft = converter.read(CHAT, raw)
    assert not converter.is_quick(draft)
    converter.finish(draft, [], 7)
    assert converter.is_quick(converter.read(CHAT, raw))
    assert converter.is_quick(converter.read(CHAT, json.dumps(body(CHAT)).encode()))
