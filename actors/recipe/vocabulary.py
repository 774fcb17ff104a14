"""The entries of a byte-level tokenizer: which of them are whole characters."""

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


def _is_whole(entry: str) -> bool:
    try:
        entry.translate(_BYTES).encode("latin-1").decode()
    except UnicodeError:
        return False
    return True
