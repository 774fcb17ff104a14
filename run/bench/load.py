"""A client that costs little: many streaming chat completions over plain sockets, events counted in the bytes."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from dataclasses import dataclass

_FIRST_TEXT = re.compile(rb'"content":"[^"]')
_EVENT = b"data: {"
_DONE = b"data: [DONE]"


class LoadError(Exception):
    """A stream that did not end as it should; the message holds what came."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream did: events received, and when (seconds after the request was sent) the first text came."""

    num_events: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What many concurrent streams did together."""

    events_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float


async def run_load(host: str, port: int, model: str, *, num_streams: int, num_tokens: int) -> Load:
    """`num_streams` at once, `num_tokens` each. Raises LoadError when a stream fails or misses an event."""
    started_s = time.perf_counter()
    streams = await asyncio.gather(*(_stream(host, port, model, i, num_tokens) for i in range(num_streams)))
    took_s = time.perf_counter() - started_s
    ttfts_ms = sorted(stream.ttft_s * 1e3 for stream in streams)
    return Load(
        events_per_s=sum(stream.num_events for stream in streams) / took_s,
        ttft_ms_p50=statistics.median(ttfts_ms),
        ttft_ms_p99=ttfts_ms[min(len(ttfts_ms) * 99 // 100, len(ttfts_ms) - 1)],
    )


async def _stream(host: str, port: int, model: str, index: int, num_tokens: int) -> Stream:
    body = {
        "model": model,
        "stream": True,
        "max_tokens": num_tokens,
        "seed": index,
        "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": f"Stream number {index}, please."}],
    }
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
        sent_s = time.perf_counter()
        ttft_s, num_events, tail = 0.0, 0, b""
        first = b""
        while data := await reader.read(1 << 18):
            if not ttft_s:
                first += data
                if _FIRST_TEXT.search(first):
                    ttft_s = time.perf_counter() - sent_s
            num_events += (tail + data).count(_EVENT) - tail.count(_EVENT)
            tail = (tail + data)[-32:]
    finally:
        writer.close()
    if _DONE not in tail or num_events < num_tokens:
        what = f"{num_events} events for {num_tokens} tokens"
        raise LoadError(f"stream {index}: {what}, from {first[:300]!r} to {tail!r}")
    return Stream(num_events, ttft_s)
