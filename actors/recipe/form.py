"""The form of an answer that a client insists on: what the official library loses of it, and all of it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as library
import orjson

from actors.recipe.calls import Tool
from actors.recipe.complaints import FORMAT
from actors.recipe.fields import Refusal
from actors.recipe.grammar import Asked
from actors.recipe.sampling import boolean
from schemas.api import Protocol
from schemas.failure import Code

OBJECT = {"type": "object"}

_TOOLS = {Protocol.CHAT_COMPLETIONS: "tools[].function.parameters", Protocol.RESPONSES: "tools[].parameters"}

_SCHEMA_MEMBERS = ("name", "description", "schema", "strict")
_NO_CHOICES = (None, "auto", "none")
_CHOICES: dict[Protocol, tuple[str, ...]] = {
    Protocol.CHAT_COMPLETIONS: ("auto", "none", "required", "{function}"),
    Protocol.RESPONSES: ("auto", "none", "required", "{function}", "{custom}"),
}
_CHOICES_OF_MESSAGES = ("{auto}", "{none}", "{any}", "{tool}")
"""Those in braces are the type of an object."""

_MEMBERS: dict[Protocol, dict[str, tuple[str, ...]]] = {
    Protocol.CHAT_COMPLETIONS: {"text": (), "json_object": (), "json_schema": ("json_schema",), "regex": ("regex",)},
    Protocol.RESPONSES: {"text": (), "json_object": (), "json_schema": _SCHEMA_MEMBERS},
}
"""Of a response format, by its type."""


@dataclass(frozen=True)
class Form:
    """`must_call`: a tool is to be called, that of the name `tool` if there is one. `is_single`: not more than one.

    `schema` is that of the answer, None for none, where the library passes over it. `is_strict` says so of the answer,
    `strict` names such tools: rewritten by the library, a schema would lose its lengths and its definitions. `said` is
    what the client said of both, where it has to be told again.
    """

    must_call: bool = False
    tool: str = ""
    is_single: bool = False
    schema: Any = None
    is_strict: bool = False
    strict: frozenset[str] = frozenset()
    said: dict[str, Any] = field(default_factory=dict)

    def freely(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same body for a model that chooses, of the same tools. While it thinks the library has no other way."""
        tools = body.get("tools")
        named = [tool for tool in tools if _name(tool) == self.tool] if isinstance(tools, list) and self.tool else []
        choice = body["tool_choice"]
        choice = {"type": "auto"} if isinstance(choice, dict) and choice.get("type") in ("any", "tool") else "auto"
        return {**body, "tool_choice": choice, **({"tools": named} if named else {})}

    def conversation(self, request: Any) -> Any:
        """What is rendered: it tells the model of the schema."""
        told = request.conversation
        if self.schema is None:
            return told
        return library.Conversation(
            told.messages,
            thinking_mode=told.thinking_mode,
            tools=told.tools,
            tool_choice=told.tool_choice,
            reasoning_effort=told.reasoning_effort,
            response_schema=self.schema,
        )

    def asked(self, protocol: Protocol, request: Any) -> Asked:
        """All that is asked for, with what the library made of the body. Raises Refusal."""
        told, parsing = request.conversation, request.parsing_options
        constraint = request.inference_options.output_constraint
        kind, text = ("", "") if constraint is None else (constraint.kind, constraint.schema)
        tools: tuple[Tool, ...] = ()
        if kind.startswith("tool_call"):
            functions = [tool["function"] for tool in orjson.loads(text)]
            functions = [one for one in functions if self.tool in ("", one["name"])]
            tools = tuple(
                Tool(one["name"], _json(one["parameters"]), one["name"] in self.strict) for one in functions
            )
        schema = self.schema if self.schema is not None else told.response_schema
        if told.response_format == "json_object":
            schema = OBJECT
        stage = parsing.thinking_initial_stage
        asked = Asked(
            thinks=stage is not None and stage.starts_in_reasoning(),
            json="" if schema is None else _json(schema),
            is_strict=self.is_strict,
            regex=told.response_regex or "",
            tools=tools,
            must_call=self.must_call and bool(tools),
            is_in_calls=parsing.starts_in_tool_calls,
            is_single=self.is_single,
            format_field=FORMAT[protocol],
            tools_field=_TOOLS.get(protocol, "tools[].input_schema"),
        )
        if (asked.json or asked.regex) and any(message.prefix and message.content for message in told.messages[-1:]):
            message = f"{asked.format_field} is not supported for an answer that has begun: leave out its prefix"
            raise Refusal(Code.UNSUPPORTED, message, asked.format_field)
        return asked


def take_form(protocol: Protocol, body: dict[str, Any]) -> Form:
    """What a body says of it; what the library would misread is taken out. Raises Refusal."""
    choice, is_single = body.get("tool_choice"), False
    kind = choice.get("type") if isinstance(choice, dict) else choice
    _check_choice(protocol, choice, body.get("tools"))
    _check_format(protocol, body)
    if isinstance(choice, dict):
        name = "tool_choice.disable_parallel_tool_use"
        is_single = boolean(choice.get("disable_parallel_tool_use", False), name)
    if protocol in _TOOLS:
        is_single = not boolean(body.pop("parallel_tool_calls", True), "parallel_tool_calls")
    schema = None if protocol in _MEMBERS else _take_schema(body)
    tools, strict = _without_strict(body.get("tools"))
    format, is_strict = _without_strictness(protocol, body)
    said = {name: body[name] for name in (*tools, *format)} if strict or is_strict else {}
    body |= {**tools, **format} if said else {}
    return Form(
        must_call=kind not in _NO_CHOICES,
        tool=_name(choice) if isinstance(choice, dict) else "",
        is_single=is_single,
        schema=schema,
        is_strict=is_strict or schema is not None,
        strict=frozenset(strict),
        said=said,
    )


def _check_choice(protocol: Protocol, choice: Any, tools: Any) -> None:
    """Raise Refusal unless it is a choice of tools that there are."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    spelled = f"{{{kind}}}" if isinstance(choice, dict) else choice
    if choice is not None and spelled not in _CHOICES.get(protocol, _CHOICES_OF_MESSAGES):
        raise Refusal(Code.UNSUPPORTED, f"tool_choice {str(kind)[:64]!r} is not supported", "tool_choice")
    if kind in _NO_CHOICES:
        return
    names = _names(tools)
    if not names:
        raise Refusal(Code.BAD_REQUEST, "tool_choice: there are no tools that could be called", "tool_choice")
    if kind in ("function", "custom", "tool") and _name(choice) not in names:
        raise Refusal(Code.BAD_REQUEST, f"tool_choice: there is no tool {_name(choice)[:64]!r}", "tool_choice")


def _check_format(protocol: Protocol, body: dict[str, Any]) -> None:
    """Raise Refusal for a response format of which anything would be lost."""
    if protocol not in _MEMBERS:
        return
    form, path = body.get(FORMAT[protocol].partition(".")[0]), FORMAT[protocol]
    if protocol is Protocol.RESPONSES and isinstance(form, dict):
        _check_members(form, ("format", "verbosity"), "text")
        form = form.get("format")
    if form is None:
        return
    kinds, kind = _MEMBERS[protocol], form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise Refusal(Code.UNSUPPORTED, f"{path}: only the types {', '.join(kinds)} are supported", path)
    _check_members(form, ("type", *kinds[kind]), path)
    if isinstance(form.get("json_schema"), dict):
        _check_members(form["json_schema"], _SCHEMA_MEMBERS, f"{path}.json_schema")
    for name in {"json_schema", "regex"}.intersection(kinds[kind]):
        if not isinstance(form.get(name), str if name == "regex" else dict) or not form[name]:
            raise Refusal(Code.BAD_REQUEST, f"{path}.{name} is missing, empty or of another type", path)
    if kind == "json_schema" and "schema" not in form.get("json_schema", form):
        raise Refusal(Code.BAD_REQUEST, f"{path}: there is no schema", path)


def _check_members(value: dict[str, Any], known: Sequence[str], path: str) -> None:
    for name in value:
        if name not in known and value[name] is not None:
            raise Refusal(Code.BAD_REQUEST, f"unknown field '{path}.{name[:64]}'", f"{path}.{name[:64]}")


def _take_schema(body: dict[str, Any]) -> Any:
    """That of Messages, which the library would pass over."""
    config = body.get("output_config")
    if isinstance(config, dict):
        _check_members(config, ("effort", "format", "task_budget"), "output_config")
    if not isinstance(config, dict) or config.get("format") is None:
        return None
    form = config["format"]
    body["output_config"] = {name: value for name, value in config.items() if name != "format"}
    name = "output_config.format"
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise Refusal(Code.UNSUPPORTED, f"{name}: only the type 'json_schema' is supported", name)
    _check_members(form, ("type", "schema"), name)
    if not isinstance(form.get("schema"), dict):
        raise Refusal(Code.BAD_REQUEST, f"{name}.schema must be a JSON Schema", f"{name}.schema")
    return form["schema"]


def _names(tools: Any, within: str = "") -> set[str]:
    """Of all that could be called."""
    found: set[str] = set()
    for tool in tools if isinstance(tools, list) else []:
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            found |= _names(tool.get("tools"), f"{_name(tool)}::")
        else:
            found.add(within + _name(tool))
    return found


def _without_strict(tools: Any, within: str = "") -> tuple[dict[str, Any], list[str]]:
    """The tools without it, and the names of those that had it."""
    if not isinstance(tools, list):
        return {}, []
    found: list[Any] = []
    strict: list[str] = []
    for tool in tools:
        if isinstance(tool, dict):
            if tool.get("type") == "namespace":
                inner, names = _without_strict(tool.get("tools"), f"{_name(tool)}::")
                tool, strict = {**tool, **inner}, strict + names
            holder = tool["function"] if isinstance(tool.get("function"), dict) else tool
            if boolean(_or(holder.get("strict"), False), "strict"):
                strict.append(within + _name(tool))
            holder = {key: value for key, value in holder.items() if key != "strict"}
            tool = {**tool, "function": holder} if "function" in tool else holder
        found.append(tool)
    return {"tools": found}, strict


def _without_strictness(protocol: Protocol, body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The response format without it, and whether it had it."""
    outer = {Protocol.CHAT_COMPLETIONS: "response_format", Protocol.RESPONSES: "text"}.get(protocol, "")
    inner = "json_schema" if outer == "response_format" else "format"
    format = body.get(outer)
    holder = format.get(inner) if isinstance(format, dict) else None
    if not isinstance(format, dict) or not isinstance(holder, dict):
        return {}, False
    is_strict = boolean(_or(holder.get("strict"), False), "strict")
    return {outer: {**format, inner: {key: value for key, value in holder.items() if key != "strict"}}}, is_strict


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _name(tool: Any) -> str:
    """Of a tool, or of the choice of one, in any of the protocols."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def _json(schema: Any) -> str:
    try:
        return orjson.dumps(schema).decode()
    except TypeError as error:  # nested more than 254 deep, or a number that is none
        raise Refusal(Code.BAD_REQUEST, f"a schema is not understood: {error}") from None
