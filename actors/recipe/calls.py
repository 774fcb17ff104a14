"""Tool calls as the model writes them (spec recipe.md §3.1), as rules of a grammar: calls of known tools, with
arguments that satisfy the tool's schema once the official library has put them together.

A section is cut at its control tokens, `｜DSML｜`; what is between two of them is one lexeme wherever it can be, since
the lexer takes the longest. So each rule begins behind such a token and ends with one:

    < ｜DSML｜ calls>\\n<  ｜DSML｜ invoke name="f">\\n<  ｜DSML｜ parameter name="a" string="true">…</
      ｜DSML｜ parameter>\\n</  ｜DSML｜ invoke>\\n</  ｜DSML｜ calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from actors.recipe.schema import Unenforceable, detached, plain, target, text_of

TEXT = "/(?s:.*)/"

_ANYTHING = {"type": ["null", "boolean", "number", "array", "object"]}
_TOP = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_BESIDE = {"$defs", "definitions", "$schema", "$id"}
_MAX_REFS = 16


class Tool(NamedTuple):
    """One that may be called, `schema` as JSON. `is_strict`: it is called as its schema says, or not at all."""

    name: str
    schema: str
    is_strict: bool = False


class Argument(NamedTuple):
    """How one may be written: as text, by the terminals `texts`, or in JSON, by the schemas `values`."""

    texts: list[str]
    values: list[Any]

    @property
    def is_possible(self) -> bool:
        return bool(self.texts or self.values)


def section(tools: Sequence[str], *, is_single: bool) -> str:
    """The rule `section`: one call or more of the tools whose rules have these names, behind the first `<` of them.

    It takes a rule `d`, the control token.
    """
    more = "" if is_single else ' (" invoke>\\n<" d call)*'
    lines = [f'section: d call{more} " invoke>\\n</" d " calls>"', f"call: {' | '.join(tools)}"]
    return "\n".join([*lines, 'n: " parameter>\\n<" d', 'e: " parameter>\\n</" d', ""])


def loose(tool: Tool) -> Tool:
    """The same one with any arguments."""
    return tool._replace(schema='{"additionalProperties": true}')


class ToolRules:
    """The rules of one tool; that of a call of it is named `name`. `shared` holds rules of JSON that others have, too,
    by what they say. Raises Unenforceable.
    """

    def __init__(self, tool: Tool, name: str, shared: dict[str, str]) -> None:
        self._name = name
        self._shared = shared
        self._lines: list[str] = []
        root = _unnamed(plain(json.loads(tool.schema), is_strict=tool.is_strict))
        arguments, rest = _arguments(root)
        self._write_call(tool.name, [is_required for _, is_required in arguments.values()], rest is not None)
        for place, (key, (schema, _)) in enumerate(arguments.items()):
            heads = [_quoted(f' parameter name="{_escaped(key)}" string="{kind}">') for kind in ("true", "false")]
            self._write_argument(f"{name}p{place}", heads, _ways(schema, root), root)
        if rest is not None:
            upper = name.upper()
            others = " & ~(" + " | ".join(_quoted(_escaped(key)) for key in arguments) + ")" if arguments else ""
            self._lines.append(f'{upper}K: /[^"\\\\<>｜\\x00-\\x20\\x7f]+/{others}')
            for kind in ("true", "false"):
                tail = _quoted(f'" string="{kind}">')
                self._lines.append(f'{upper}_{kind.upper()}: " parameter name=\\"" {upper}K {tail}')
            self._write_argument(f"{name}r", [f"{upper}_TRUE", f"{upper}_FALSE"], _ways(rest, root), root)

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _write_call(self, tool: str, required: list[bool], is_open: bool) -> None:
        """Which arguments follow which: in the order of the schema, those that are not required may be missing.

        `m3` is the fourth one or one of those behind it, `a3` what may come behind the third.
        """
        name, num = self._name, len(required)
        begin = _quoted(f' invoke name="{tool}">\n')[:-1]
        ways = [] if any(required) else [f'{begin}\\n</" d']
        if num or is_open:
            ways.append(f'{begin}<" d {name}m0')
        self._lines.append(f"{name}: {' | '.join(ways)}")
        for place in range(num + 1):
            is_last = place == num
            after = [] if any(required[place:]) else ["e"]
            if not is_last or is_open:
                own = f"{name}r {name}a{num}" if is_last else f"{name}p{place} {name}a{place + 1}"
                goes_on = not is_last and not required[place] and (is_open or place + 1 < num)
                self._lines.append(f"{name}m{place}: {own}" + (f" | {name}m{place + 1}" if goes_on else ""))
                after.append(f"n {name}m{place}")
            if place or is_open:
                self._lines.append(f"{name}a{place}: {' | '.join(after)}")

    def _write_argument(self, rule: str, heads: Sequence[str], argument: Argument, root: Any) -> None:
        """One written out, from behind the control token that opens it to the one that closes it."""
        ways = []
        if argument.texts:
            ways.append(f"{heads[0]} ({' | '.join(argument.texts)}) d")
        if argument.values:
            members = argument.values[0] if len(argument.values) == 1 else {"anyOf": argument.values}
            text = text_of(detached(members, root))
            ways.append(f'{heads[1]} {self._shared.setdefault(text, f"j{len(self._shared)}")} "</" d')
        self._lines.append(f"{rule}: {' | '.join(ways)}")


def _unnamed(root: Any) -> Any:
    """A tool's schema itself, where it is given as one of its definitions: so one is that has parts of its own kind."""
    for _ in range(_MAX_REFS):
        if not isinstance(root, dict) or set(root) - _BESIDE != {"$ref"} or not isinstance(root["$ref"], str):
            break
        named = target(root, root["$ref"])
        root = {**{key: root[key] for key in _BESIDE if key in root}, **named} if isinstance(named, dict) else named
    return root


def _arguments(root: Any) -> tuple[dict[str, tuple[Any, bool]], Any]:
    """What a tool's `plain` schema says of each argument, and whether it is required; and of others, None for none.

    Others are allowed only where the schema says so itself: a model that makes one up is of no use to anyone.
    """
    if root is True:
        root = {}
    if not isinstance(root, dict):
        raise Unenforceable("nothing satisfies it", is_wrong=True)
    if strange := sorted(set(root) - _TOP):
        raise Unenforceable(f"{strange[0]} is not supported for the arguments as a whole")
    if root.get("type", "object") not in ("object", ["object"]):
        raise Unenforceable("arguments are an object", is_wrong=True)
    named, required = root.get("properties", {}), root.get("required", [])
    rest = root.get("additionalProperties", False)
    if not isinstance(named, dict) or not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        raise Unenforceable("properties is an object, and required a list of names", is_wrong=True)
    undeclared = root.get("additionalProperties", True)
    schemas = {**named, **{name: undeclared for name in required if name not in named}}
    arguments: dict[str, tuple[Any, bool]] = {}
    for name, schema in schemas.items():
        if _ways(schema, root).is_possible:
            arguments[name] = (schema, name in required)
        elif name in required:
            raise Unenforceable(f"nothing satisfies {name[:64]!r}, which is required", is_wrong=True)
    return arguments, rest if _ways(rest, root).is_possible else None


def _ways(schema: Any, root: Any, depth: int = 0) -> Argument:
    """Strings are written as they are, unless what they have to be can only be said of JSON: a pattern, a format."""
    if schema is False:
        return Argument([], [])
    if schema is True or not schema:
        return Argument(["/(?s:.*)<\\//"], [_ANYTHING])
    keys = set(schema)
    if keys == {"$ref"} and isinstance(schema["$ref"], str) and depth < _MAX_REFS:
        return _ways(target(root, schema["$ref"]), root, depth + 1)
    if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
        found = [_ways(one, root, depth + 1) for one in schema["anyOf"]]
        texts = list(dict.fromkeys(text for ways in found for text in ways.texts))
        return Argument(texts, [value for ways in found for value in ways.values])
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if keys <= {"type", "enum", "const"} and keys & {"enum", "const"} and isinstance(schema.get("enum", []), list):
        return _listed(schema, kinds)
    if not isinstance(kinds, list) or not kinds:
        return Argument([], [schema])
    if "string" not in kinds:
        return Argument([], [schema])
    lengths = {"minLength", "maxLength"}
    if keys & {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "enum", "const", "pattern", "format"}:
        return Argument([], [schema])
    rest = [kind for kind in kinds if kind != "string"]
    others = [{**{k: v for k, v in schema.items() if k not in lengths}, "type": rest}] if rest else []
    return Argument([_text(schema.get("minLength", 0), schema.get("maxLength"))], others)


def _listed(schema: dict[str, Any], kinds: Any) -> Argument:
    given = [schema["const"]] if "const" in schema else schema["enum"]
    if "const" in schema and "enum" in schema:
        return Argument([], [schema])
    texts = [one for one in given if isinstance(one, str) and (kinds is None or "string" in kinds)]
    others = [one for one in given if not isinstance(one, str)]
    kept = {"type": schema["type"]} if "type" in schema else {}
    if others and kinds is not None:
        others = [one for one in others if _is_of(one, kinds)]
    values = [{**kept, "enum": others}] if others else []
    return Argument([_quoted(text + "</") for text in texts], values)


def _is_of(value: Any, kinds: Sequence[Any]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    return ("array" if isinstance(value, list) else "object") in kinds


def _text(least: Any, most: Any) -> str:
    """The terminal of a text of so many characters, with the `</` behind it."""
    for bound in (least, most):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise Unenforceable("minLength and maxLength are whole numbers", is_wrong=True)
    if most is None:
        return "/(?s:.*)<\\//" if least == 0 else f"/(?s:.{{{least},}})<\\//"
    if least > most:
        raise Unenforceable(f"minLength ({least}) is greater than maxLength ({most})", is_wrong=True)
    return f"/(?s:.{{{least},{most}}})<\\//"


def _escaped(key: str) -> str:
    """As the library takes a key: it puts it between quotes as it is, and ends it at the first space."""
    text = json.dumps(key, ensure_ascii=False)[1:-1]
    return re.sub("[ <>｜]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _quoted(text: str) -> str:
    """A terminal that is this text."""
    return json.dumps(text, ensure_ascii=False)
