"""Traces of real requests: Mooncake's (JSON lines) and Azure's (CSV), told apart by what the file begins with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from run.settings import SettingsError
from run.simulate.arrival import Arrival, num_blocks

TRACE_TOKENS = 512
"""Of a block of Mooncake's traces: four of ours."""

SUB_BLOCKS = num_blocks(TRACE_TOKENS)
MAX_ID = 1 << 60
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

_EVERY = 500
"""Requests from one report of progress to the next."""


class TraceError(SettingsError):
    """A file that is no trace. Says where it stops being one, and what was expected."""


def read_trace(path: Path, limit: int = 0, progress: Callable[[float], None] = lambda done: None) -> list[Arrival]:
    """The requests of a trace, in order of arrival, the first one at 0 s; the first `limit` of them, or all for 0.

    Answers of no tokens count as one token. Azure's traces do not say what prompts share: nothing. Raises TraceError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: no trace can be read there: {error}") from None
    while lines and not lines[-1].strip():
        del lines[-1]
    if not lines:
        raise TraceError(f"{path}: the file is empty")
    if lines[0].strip() == AZURE_HEADER:
        read, first = _azure, 2
    elif lines[0].lstrip().startswith("{"):
        read, first = _mooncake, 1
    else:
        raise TraceError(
            f"{path}:1: neither a trace of Mooncake's, whose lines are JSON objects, nor one of Azure's, which begins "
            f"with {AZURE_HEADER}"
        )
    rows = lines[first - 1 :]
    if limit:
        rows = rows[:limit]
    arrivals = []
    for number, arrival in enumerate(_numbered(path, first, read(rows))):
        arrivals.append(arrival)
        if number % _EVERY == 0:
            progress(number / len(rows))
    if not arrivals:
        raise TraceError(f"{path}: there is no request in it")
    progress(1.0)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    begin_s = arrivals[0].at_s
    return [_moved(arrival, begin_s) for arrival in arrivals]


def _moved(arrival: Arrival, begin_s: float) -> Arrival:
    return Arrival(arrival.at_s - begin_s, arrival.num_tokens, arrival.num_output, arrival.blocks)


def _numbered(path: Path, first: int, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """The same, with errors that say which line of which file."""
    number = first
    while True:
        try:
            arrival = next(arrivals)
        except StopIteration:
            return
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        yield arrival
        number += 1


def _mooncake(rows: list[str]) -> Iterator[Arrival]:
    for text in rows:
        row = json.loads(text)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        at_ms, num_tokens, num_output = (_count(row, key) for key in ("timestamp", "input_length", "output_length"))
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < MAX_ID for id in ids):
            raise ValueError(f"hash_ids must be a list of whole numbers, from 0 to below {MAX_ID:,}")
        if len(ids) != -(-num_tokens // TRACE_TOKENS):
            raise ValueError(f"{len(ids)} hash_ids do not fit an input_length of {num_tokens}: one for each 512 tokens")
        blocks = tuple(SUB_BLOCKS * id + part for id in ids for part in range(SUB_BLOCKS))
        yield Arrival(at_ms / 1000, num_tokens, max(1, num_output), blocks[: num_blocks(num_tokens)])


def _count(row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int or value < (key == "input_length"):
        raise ValueError(f"{key} must be a whole number, {'at least 1' if key == 'input_length' else 'not negative'}")
    return value


def _azure(rows: list[str]) -> Iterator[Arrival]:
    used = 0
    for text in rows:
        fields = text.split(",")
        if len(fields) != 3:
            raise ValueError(f"{len(fields)} fields where there should be {AZURE_HEADER}")
        when = datetime.fromisoformat(fields[0].strip()).replace(tzinfo=None)  # some traces name the zone
        at_s = (when - datetime(1970, 1, 1)).total_seconds()
        if not (fields[1].strip().isdecimal() and fields[2].strip().isdecimal() and int(fields[1]) > 0):
            raise ValueError(f"{fields[1]} ContextTokens, {fields[2]} GeneratedTokens: whole numbers, at least 1 and 0")
        num_tokens, num_output = int(fields[1]), int(fields[2])
        blocks = tuple(range(used, used + num_blocks(num_tokens)))
        used += len(blocks)
        yield Arrival(at_s, num_tokens, max(1, num_output), blocks)
