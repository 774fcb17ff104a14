"""JSON Schemas of requests, as llguidance understands them: the same instances, or fewer, or a reason why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from llguidance import regex_to_lark

MAX_DEPTH = 64

_ONE = frozenset(
    "additionalItems additionalProperties contains else if items not propertyNames then unevaluatedItems"
    " unevaluatedProperties".split()
)
_NAMED = frozenset("$defs definitions dependentSchemas patternProperties properties".split())
_LISTED = frozenset("allOf anyOf oneOf prefixItems".split())
_VALUES = frozenset(
    "$anchor $dynamicAnchor $dynamicRef $id $recursiveRef $ref $schema const dependencies dependentRequired enum"
    " exclusiveMaximum exclusiveMinimum format maxContains maxItems maxLength maxProperties maximum minContains"
    " minItems minLength minProperties minimum multipleOf pattern required type uniqueItems".split()
)
"""What says something of instances; any other keyword says nothing."""

_MORE = frozenset("$ref allOf anyOf oneOf patternProperties".split())
"""What may name keys of an object besides its `properties`."""

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Which are enforced; any other says nothing of an instance, as the standard has it."""

MOST_EXACT = 2**53
"""Whole numbers beyond are not kept exactly: they go through doubles, and bounds through 64 bits."""

MOST_SIZE = 10**6
"""Of anything that is counted."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SIZES = tuple(f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties"))

_WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the parts of JSON: as much as makes it readable. Without a bound a model can go on with it forever."""


class Unenforceable(ValueError):
    """A schema that cannot be held. `is_wrong`: nobody could, as it is none, or nothing satisfies it."""

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


def plain(schema: Any, *, is_strict: bool = False) -> Any:
    """A copy without what says nothing of instances (titles, defaults, unknown keywords). Raises Unenforceable.

    `is_strict`: objects have no keys but those that are named, unless it says so itself.

    Patterns are those of ECMAScript: classes such as \\d mean ASCII. That a key comes twice is not seen, so a number of
    keys can only be asked for as far as they are named.
    """
    found = _plain(schema, 0, is_strict)
    _check_ends(found)
    return found


def text_of(schema: Any) -> str:
    """As part of a grammar: of a `plain` one, with the whitespace that is allowed."""
    options = {"whitespace_pattern": _WHITESPACE}
    return "%json " + json.dumps({"x-guidance": options, **({} if schema is True else schema)}, ensure_ascii=False)


def target(root: Any, ref: str) -> Any:
    """What `ref` names within a schema. Raises Unenforceable."""
    if ref != "#" and not ref.startswith("#/"):
        raise Unenforceable(f"$ref {ref[:200]!r} is not supported: only what begins with #/ is")
    at = root
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isascii() and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            raise Unenforceable(f"$ref {ref[:200]!r} names nothing", is_wrong=True)
    return at


def detached(schema: Any, root: Any) -> Any:
    """Part of a schema as one of its own: what it names of the rest comes with it."""
    if not any(True for _ in _refs(schema)):
        return schema
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _plain(schema: Any, depth: int, is_strict: bool) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise Unenforceable(f"a schema is an object or a boolean, not {json.dumps(schema)[:64]}", is_wrong=True)
    if depth > MAX_DEPTH:
        raise Unenforceable(f"it is nested more than {MAX_DEPTH} deep")
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "items" and isinstance(value, list):
            found[key] = [_plain(one, depth + 1, is_strict) for one in value]
        elif key in _ONE:
            found[key] = _plain(value, depth + 1, is_strict)
        elif key in _NAMED and isinstance(value, dict):
            ours = _ascii if key == "patternProperties" else str
            found[key] = {ours(name): _plain(one, depth + 1, is_strict) for name, one in value.items()}
        elif key in _LISTED and isinstance(value, list):
            is_whole = is_strict and key != "allOf"  # of which each names some of the keys
            found[key] = [_plain(one, depth + 1, is_whole) for one in value]
        elif key == "pattern" and isinstance(value, str):
            found[key] = _ascii(value)
        elif key in _NAMED or key in _LISTED or key in _VALUES:
            found[key] = value
    _check_numbers(found)
    if is_strict and ("properties" in found or found.get("type") == "object") and not set(found) & _MORE:
        found.setdefault("additionalProperties", False)
    if found.get("uniqueItems") is False:
        del found["uniqueItems"]
    if found.get("format", _FORMATS[0]) not in _FORMATS:
        del found["format"]
    least, required = found.get("minProperties", 0), found.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        raise Unenforceable(f"minProperties {least} is not supported: required names {len(required)}")
    return found


def _check_numbers(schema: dict[str, Any]) -> None:
    """Raise Unenforceable for those that an answer would not be held to exactly."""
    for key in _BOUNDS:
        if _is_beyond(schema.get(key), MOST_EXACT - 1):
            raise Unenforceable(f"{key} {schema[key]} is not supported: numbers are kept exactly below 2^53")
    for key in _SIZES:
        if _is_beyond(schema.get(key), MOST_SIZE):
            raise Unenforceable(f"{key} {schema[key]} is not supported: {MOST_SIZE} is the most")
    for key in ("const", "enum"):
        if key in schema:
            _check_value(schema[key], key)


def _check_value(value: Any, key: str) -> None:
    if _is_beyond(value, MOST_EXACT):
        raise Unenforceable(f"{value} in {key} is not supported: numbers are kept exactly up to 2^53")
    for part in value.values() if isinstance(value, dict) else _list(value):
        _check_value(part, key)


def _is_beyond(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) > most


def _ascii(pattern: str) -> str:
    """llguidance reads \\d and \\w as Unicode has them."""
    return regex_to_lark(pattern, "dw").replace("\\/", "/")


def _refs(schema: Any) -> Iterator[str]:
    """Of a `plain` schema, wherever in it."""
    if isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref
        for part in _parts(schema):
            yield from _refs(part)


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from value.values()
        elif (key in _LISTED or key in _ONE) and isinstance(value, list):
            yield from value
        elif key in _ONE:
            yield value


def _moved(schema: Any) -> Any:
    """With what it names under `#/$defs/root`."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _moved(one) for name, one in value.items()}
        elif (key in _LISTED or key in _ONE) and isinstance(value, list):
            found[key] = [_moved(one) for one in value]
        elif key in _ONE:
            found[key] = _moved(value)
        elif key == "$ref" and isinstance(value, str):
            found[key] = "#/$defs/root" + value[1:]
        elif key not in ("$id", "$schema"):
            found[key] = value
    return found


def _check_ends(root: Any) -> None:
    """Raise Unenforceable if every instance would have to go on within itself forever."""
    refs = list(dict.fromkeys(_refs(root)))
    targets = {ref: target(root, ref) for ref in refs}
    ending: set[str] = set()
    for _ in range(MAX_DEPTH):
        num = len(ending)
        for ref in refs:
            if ref not in ending and _ends(targets[ref], ending):
                ending.add(ref)
        refs.reverse()  # so that a chain of them takes two rounds, however they are ordered
        if len(ending) == num:
            break
    if not _ends(root, ending):
        raise Unenforceable("nothing that has an end satisfies it", is_wrong=True)


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether it has an instance, as far as size goes, if the targets of `ending` have."""
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(ref := schema.get("$ref"), str) and ref not in ending:
        return False
    if not all(_ends(one, ending) for one in _list(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_ends(one, ending) for one in _list(schema[key])):
            return False
    if "enum" in schema or "const" in schema:
        return True
    kinds = schema.get("type", "null")
    kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
    if not kinds or any(kind not in ("object", "array") for kind in kinds):
        return True
    if "object" in kinds:
        named = schema.get("properties")
        named, rest = named if isinstance(named, dict) else {}, schema.get("additionalProperties", True)
        if all(_ends(named.get(name, rest), ending) for name in _list(schema.get("required")) if isinstance(name, str)):
            return True
    if "array" in kinds:
        least = schema.get("minItems", 0)
        first, rest = _list(schema.get("prefixItems")), schema.get("items", True)
        least = least if isinstance(least, int) else 0
        needed = [*first[:least], *([rest] if least > len(first) else [])]
        return all(_ends(one, ending) for one in needed)
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
