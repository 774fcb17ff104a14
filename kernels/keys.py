"""Reading the keys of a JSON configuration: each has one type, and a wrong one is named."""

from __future__ import annotations

import dataclasses
import json
from reprlib import repr as short
from typing import Any

_BEYOND = 1 << 63


class ConfigError(ValueError):
    """config.json is missing, is not JSON, lacks a key, or holds a value this model cannot have."""


def parse(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def convert(name: str, kind: str, value: Any) -> Any:
    """`value` of the key `name` as the field type `kind`. Raises ConfigError naming the key."""
    if kind.endswith(" | None"):
        return None if value is None else convert(name, kind.removesuffix(" | None"), value)
    items = value if isinstance(value, list) else [value]
    # JSON knows neither NaN nor infinity, but its reader does; integers have any length.
    checked = (int, float) if kind == "float" else (int,)
    if any(type(item) in checked and not abs(item) < _BEYOND for item in items):
        raise ConfigError(f"{name} is out of range")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int" and number and float(value).is_integer():
        return int(value)
    if kind == "float" and number:
        return float(value)
    if kind == "tuple[int, ...]" and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{name} must be {kind}, not {short(value)}")


def convert_fields(name: str, target: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass `target` from an object's `keys`; those with a default may be absent."""
    values = {}
    for field in dataclasses.fields(target):
        if field.name in keys:
            values[field.name] = convert(f"{name}.{field.name}", str(field.type), keys[field.name])
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{name}.{field.name} is missing")
    return values
