"""A client that costs little: many streaming chat completions over plain sockets, events counted in the bytes.

How many tokens an answer has is what its last event says of its usage: an event carries those of a step, or of several
when it had to wait.
"""

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
_USAGE = re.compile(rb'"completion_tokens":([0-9]+)')
_KEPT = 32
_END_BYTES = 1024


class LoadError(Exception):
    """A stream that did not end as it should; the message holds what came."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream did: events and tokens received, and when (seconds after it was asked for) the first came."""

    num_events: int
    num_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What many concurrent streams did together."""

    tokens_per_s: float
    events_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float


async def run_load(host: str, port: int, model: str, *, num_streams: int, num_tokens: int) -> Load:
    """`num_streams` at once, `num_tokens` each. Raises LoadError when a stream fails or misses a token."""
    started_s = time.perf_counter()
    streams = await asyncio.gather(*(_stream(host, port, model, i, num_tokens) for i in range(num_streams)))
    took_s = time.perf_counter() - started_s
    ttfts_ms = sorted(stream.ttft_s * 1e3 for stream in streams)
    return Load(
        tokens_per_s=sum(stream.num_tokens for stream in streams) / took_s,
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
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    loop = asyncio.get_running_loop()
    transport, counter = await loop.create_connection(lambda: _Counter(loop.create_future()), host, port)
    counter.sent_s = time.perf_counter()
    transport.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    await counter.is_over
    usage = _USAGE.search(counter.end)
    if _DONE not in counter.end or usage is None or int(usage[1]) != num_tokens:
        what = f"{counter.num_events} events for {num_tokens} tokens"
        raise LoadError(f"stream {index}: {what}, from {counter.start[:300]!r} to {counter.end!r}")
    return Stream(counter.num_events, num_tokens, counter.ttft_s)


class _Counter(asyncio.Protocol):
    """Counts events in what comes, wherever the pieces are cut."""

    def __init__(self, is_over: asyncio.Future[None]) -> None:
        self.is_over = is_over
        self.sent_s = self.ttft_s = 0.0
        self.num_events = 0
        self.start = self.tail = self.end = b""

    def data_received(self, data: bytes) -> None:
        if not self.ttft_s:
            self.start += data
            if _FIRST_TEXT.search(self.start):
                self.ttft_s = time.perf_counter() - self.sent_s
        self.end = (self.end + data)[-_END_BYTES:]
        joined = self.tail + data
        self.num_events += joined.count(_EVENT)
        # So much is kept as can be the beginning of an event, or the end of the stream; no event is counted twice.
        self.tail = joined[-_KEPT:].rpartition(_EVENT)[2]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)
