"""The entries of a byte-level tokenizer: their bytes, and which of them are whole characters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(0x100)) - set(_PRINTED))
_BYTES = {0x100 + i: byte for i, byte in enumerate(_OTHERS)}
"""Byte-level BPE writes a byte as one character: printable ones of Latin-1 as themselves, others from U+0100 on."""


def vocabulary(path: Path) -> dict[str, int]:
    """The entries of a tokenizer.json by their spelling, one character for each byte."""
    entries: dict[str, int] = orjson.loads(path.read_bytes())["model"]["vocab"]
    return entries


def ragged(entries: Mapping[str, int]) -> frozenset[int]:
    """The ids of those that are not whole characters of UTF-8: text that ends with one may go on within a character."""
    return frozenset(id for entry, id in entries.items() if not entry.isascii() and not _is_whole(entry))


def tokens(path: Path, num_tokens: int) -> tuple[list[bytes], list[int]]:
    """The bytes of each of so many token ids, and the ids that are no text: added tokens, and ids without an entry."""
    read = orjson.loads(path.read_bytes())
    added = {token["id"]: token["content"].encode() for token in read["added_tokens"]}
    found = [b""] * num_tokens
    for entry, id in read["model"]["vocab"].items():
        if id not in added:  # such an entry is not spelled by bytes
            found[id] = bytes_of(entry)
    special = sorted({*added, *(id for id, token in enumerate(found) if not token)})
    for id in special:
        found[id] = added.get(id) or b"<[%d]>" % id
    return found, special


def bytes_of(entry: str) -> bytes:
    """What an entry stands for."""
    return entry.translate(_BYTES).encode("latin-1")


def _is_whole(entry: str) -> bool:
    try:
        bytes_of(entry).decode()
    except UnicodeError:
        return False
    return True
