"""API keys: who a caller is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from actors.rules.tenants import Tenants
from schemas.api import PUBLIC


class KeysError(ValueError):
    """SHOAL_API_KEYS cannot be read. Never shows a key."""


@dataclass(frozen=True)
class Keys:
    """Keys and the tenant each belongs to. Without any, everyone is the tenant `public`."""

    tenants: tuple[tuple[bytes, str], ...] = ()

    @classmethod
    def parse(cls, text: str, tenants: Tenants) -> Keys:
        """Read `key` or `key=tenant`, comma separated; a key without a tenant is the tenant `public`. With those of
        `tenants`.

        Raises KeysError on an empty key or tenant, on keys that no header can carry alike from every client, and on
        one that is another tenant's already.
        """
        known = {key.encode(): tenant.name for tenant in tenants for key in tenant.keys}
        for number, part in enumerate((part.strip() for part in text.split(",") if part.strip()), 1):
            key, separator, tenant = part.partition("=")
            if not key.strip() or (separator and not tenant.strip()):
                raise KeysError(f"SHOAL_API_KEYS: entry {number} is not `key` or `key=tenant`")
            if not key.isascii():
                raise KeysError(f"SHOAL_API_KEYS: entry {number}: a key must be ASCII, as HTTP headers are")
            name = tenant.strip() or PUBLIC
            if (owner := known.setdefault(key.strip().encode(), name)) != name:
                raise KeysError(f"SHOAL_API_KEYS: entry {number}: this key of tenant {name} is also {owner}'s")
        return cls(tuple(known.items()))

    def __bool__(self) -> bool:
        return bool(self.tenants)

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """The caller's tenant, from `authorization: Bearer` or `x-api-key` (lower-case names); None if unknown.

        Looked up by a digest, so that the time it takes tells nothing about the keys, nor grows with them.
        """
        if not self.tenants:
            return PUBLIC
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        found = (self._by_digest.get(_digest(given.encode())) for given in (bearer, headers.get("x-api-key", "")))
        return next((tenant for tenant in found if tenant is not None), None)

    @cached_property
    def _by_digest(self) -> dict[bytes, str]:
        return {_digest(key): tenant for key, tenant in self.tenants}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
