"""Tenants: who shares the system, by which keys they are known, what each may use, whose cached blocks it may read."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.api import Protocol

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_NAMES = frozenset(Protocol)
"""`shoal.api.<protocol>` is the public tenant's."""

_NOT_USERS = re.compile(r"internal|client(-\d+)?")
_SECRET = re.compile(r"[!#-\[\]-~]+")
"""What neither HTTP headers nor the broker's file need an escape for: ASCII without spaces, quotes and backslashes."""

_TYPES = {"keys": list, "nats_password": str, "cache": str, "requests_per_minute": int, "tokens_per_minute": int}
_TAG_DIGITS = 8
_ID_DIGITS = 32


class TenantsError(ValueError):
    """A tenants file that cannot be used. Names the file, the key and what is wrong; never shows a secret."""


@dataclass(frozen=True)
class Tenant:
    """One tenant. `cache` is the group it shares cached prefixes with, empty for none; a limit of 0 is none."""

    name: str
    keys: tuple[str, ...] = field(default=(), repr=False)
    nats_password: str = field(default="", repr=False)
    cache: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


class Tenants:
    """The tenants of a file, by name. Those it does not name (`public` among them) have no limits."""

    def __init__(self, by_name: Mapping[str, Tenant] | None = None) -> None:
        self._by_name = dict(by_name or {})

    @classmethod
    def from_file(cls, path: Path) -> Tenants:
        """Read a file. Raises TenantsError."""
        try:
            return cls.parse(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise TenantsError(f"{path}: {why}") from None

    @classmethod
    def parse(cls, text: str, where: str) -> Tenants:
        """Read the text of a file that is called `where`. Raises TenantsError."""
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # Its message ends with the place, and may begin with what stands there.
            place = re.search(r"\(at [^)]*\)$", str(error))
            raise TenantsError(f"{where}: not TOML {place[0] if place else ''}".rstrip()) from None
        tables = content.pop("tenants", {})
        if content:
            raise TenantsError(f"{where}: unknown key {next(iter(content))!r}; it holds tables [tenants.NAME] only")
        if not isinstance(tables, dict):
            raise TenantsError(f"{where}: tenants must be tables [tenants.NAME]")
        by_name = {name: _tenant(where, name, table) for name, table in tables.items()}
        owners: dict[str, str] = {}
        for tenant in by_name.values():
            for key in tenant.keys:
                if (owner := owners.setdefault(key, tenant.name)) != tenant.name:
                    raise TenantsError(f"{where}: tenants.{tenant.name}: keys: one of them is also {owner}'s")
        return cls(by_name)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Tenant:
        """The tenant of this name; one without limits if the file does not have it."""
        return self._by_name.get(name) or Tenant(name)

    def cache(self, name: str) -> str:
        """What the keys of a tenant's cached blocks begin with: equal for two tenants only if both name one group."""
        group = self.get(name).cache
        return f"group:{group}" if group else f"tenant:{name}"


def new_id(tenant: str, random_bits: int) -> str:
    """A request id, 32 hex digits, that shows whose it is: the last eight are the tenant's own."""
    return f"{random_bits % 16 ** (_ID_DIGITS - _TAG_DIGITS):0{_ID_DIGITS - _TAG_DIGITS}x}{_tag(tenant)}"


def is_id_of(tenant: str, id: str) -> bool:
    """Whether a request id is this tenant's. What is none is nobody's."""
    return len(id) == _ID_DIGITS and id.endswith(_tag(tenant)) and set(id) <= set("0123456789abcdef")


def _tag(tenant: str) -> str:
    return hashlib.sha256(f"tenant\0{tenant}".encode()).hexdigest()[:_TAG_DIGITS]


def _tenant(where: str, name: str, table: Any) -> Tenant:
    if not _NAME.fullmatch(name) or name in _NOT_NAMES:
        what = "a name has 1 to 64 letters, digits, - and _, and is not one of a protocol"
        raise TenantsError(f"{where}: tenants: {name[:80]!r}: {what}")
    where = f"{where}: tenants.{name}"
    if not isinstance(table, dict):
        raise TenantsError(f"{where}: must be a table [tenants.{name}]")
    for key, value in table.items():
        kind = _TYPES.get(key)
        if kind is None:
            raise TenantsError(f"{where}: unknown key {key!r}; choose from {', '.join(_TYPES)}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TenantsError(f"{where}: {key} must be of type {kind.__name__}, not {type(value).__name__}")
        if isinstance(value, int) and value < 0:
            raise TenantsError(f"{where}: {key} must be 0 (no limit) or more, not {value}")
    keys, password = table.get("keys", []), table.get("nats_password")
    for number, key in enumerate(keys, 1):
        if not isinstance(key, str) or not _SECRET.fullmatch(key):
            raise TenantsError(f"{where}: keys: number {number} is not a string of ASCII without spaces and quotes")
    if password is not None and not _SECRET.fullmatch(password):
        raise TenantsError(f"{where}: nats_password is not a string of ASCII without spaces and quotes")
    if password is not None and _NOT_USERS.fullmatch(name):
        raise TenantsError(f"{where}: nats_password: a user {name!r} there is already; rename the tenant")
    if "cache" in table and not _NAME.fullmatch(table["cache"]):
        raise TenantsError(f"{where}: cache: a group has 1 to 64 letters, digits, - and _")
    return Tenant(**{**table, "name": name, "keys": tuple(keys)})
