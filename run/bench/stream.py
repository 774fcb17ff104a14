"""`shoal bench stream`: streams as clients of the service that runs here see them, at several rates of arrival.

An open loop: requests come when chance has it (Poisson), whether earlier ones have ended or not, as those of users do.
So what is slow is not spared, and times count from when a request was due.
"""

from __future__ import annotations

import json as json_module
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from run.client import GatewayClient, GatewayError
from run.settings import Settings, SettingsError

RATES = (0.5, 1.0, 2.0, 4.0)
SECONDS = 20.0
NUM_TOKENS = 96
PERCENTILES = (50, 90, 99)
_WORDS = ("river", "stone", "paper", "seven", "quiet", "garden", "copper", "winter", "signal", "orange")


@dataclass(slots=True)
class Seen:
    """One stream: seconds from when it was due to its first text, and of each event with text after that; its tokens.

    `error` is why it ended, if it was not as it should.
    """

    ttft_s: float = 0.0
    events_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


def bench_stream(
    *,
    url: str = "",
    key: str = "",
    rate: tuple[float, ...] = RATES,
    seconds: float = SECONDS,
    num_tokens: int = NUM_TOKENS,
    json: bool = False,
) -> int:
    """Time to the first token, time per token and gaps between events of streams that come at random.

    Parameters
    ----------
    url
        Where the gateway is; by default that of the stack that runs from SHOAL_HOME, else port SHOAL_HTTP_PORT here.
    key
        An API key, if the gateway asks for one.
    rate
        Requests a second, on average; give it again for more of them.
    seconds
        How long they come, for each rate. What runs then is waited for.
    num_tokens
        Of each answer.
    json
        Print one JSON object instead of a table: {rate: figures}.
    """
    if not all(0 < one < 1e4 for one in (*rate, seconds)) or num_tokens < 1:
        given = f"--rate {' '.join(map(str, rate))} --seconds {seconds} --num-tokens {num_tokens}"
        raise SettingsError(f"{given}: give numbers above 0, and at most 10,000")
    client = GatewayClient(Settings.from_environment(), url, key)
    try:
        ask = asker(client, client.first_model(), num_tokens)
        with Progress(disable=json, transient=True) as progress:
            task = progress.add_task("warming up", total=seconds * len(rate))
            for number in range(3):
                _follow(ask, random.Random(number), 0.0, warm := Seen())
                if warm.error:
                    raise GatewayError(warm.error)
            found = {}
            for one in rate:
                progress.update(task, description=f"{one:g} requests/s")
                found[f"{one:g}"] = figures(*run_open(ask, one, seconds, lambda s: progress.advance(task, s)))
    except GatewayError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    if json:
        print(json_module.dumps(found))
    else:
        _print(found)
    return int(any(one["num_failed"] for one in found.values()))


Ask = Callable[[random.Random], Any]
"""A request by chance: its events, as `GatewayClient.stream` gives them."""


def asker(client: GatewayClient, model: str, num_tokens: int) -> Ask:
    """Short questions of words by chance, each answered with so many tokens."""

    def ask(chance: random.Random) -> Any:
        words = " ".join(chance.choices(_WORDS, k=chance.randint(8, 48)))
        body = {"model": model, "messages": [{"role": "user", "content": words}], "stream": True}
        body |= {"max_tokens": num_tokens, "ignore_eos": True, "thinking": {"type": "disabled"}}
        return client.stream("/v1/chat/completions", {**body, "seed": chance.randrange(1 << 31)})

    return ask


def run_open(ask: Ask, rate: float, seconds: float, told: Callable[[float], None]) -> tuple[list[Seen], float]:
    """The streams of so many seconds, and how long it took until all had ended."""
    chance = random.Random(f"{rate} {seconds}")
    started_s, due_s = time.perf_counter(), 0.0
    seen: list[Seen] = []
    threads: list[threading.Thread] = []
    while (wait_s := chance.expovariate(rate)) + due_s < seconds or not threads:
        due_s += wait_s
        time.sleep(max(0.0, started_s + due_s - time.perf_counter()))
        seen.append(Seen())
        args = (ask, random.Random(chance.random()), started_s + due_s, seen[-1])
        threads.append(threading.Thread(target=_follow, args=args, daemon=True))
        threads[-1].start()
        told(wait_s)
    for thread in threads:
        thread.join()
    return seen, time.perf_counter() - started_s


def _follow(ask: Ask, chance: random.Random, due_s: float, seen: Seen) -> None:
    try:
        for event in ask(chance):
            now_s = time.perf_counter()
            if any(choice["delta"].get("content") for choice in event["choices"]):
                seen.events_s.append(now_s)
            seen.num_tokens = (event.get("usage") or {}).get("completion_tokens", seen.num_tokens)
        if seen.events_s:
            seen.ttft_s = seen.events_s[0] - due_s
        else:
            seen.error = "an answer without text"
    except GatewayError as error:
        seen.error = str(error)


def figures(seen: Sequence[Seen], took_s: float) -> dict[str, Any]:
    """What clients saw. A stream's time per token is that behind its first event, spread over the tokens there."""
    good = [one for one in seen if not one.error]
    gaps_s = [late - soon for one in good for soon, late in zip(one.events_s, one.events_s[1:], strict=False)]
    tpots_s = [(one.events_s[-1] - one.events_s[0]) / (one.num_tokens - 1) for one in good if one.num_tokens > 1]
    num_tokens, num_events = sum(one.num_tokens for one in good), sum(len(one.events_s) for one in good)
    return {
        "num_requests": len(seen),
        "num_failed": len(seen) - len(good),
        "tok_s": round(num_tokens / took_s, 1),
        "tokens_per_event": round(num_tokens / max(num_events, 1), 2),
        "ttft_ms": _percentiles([one.ttft_s for one in good]),
        "tpot_ms": _percentiles(tpots_s),
        "gap_ms": _percentiles(gaps_s),
    }


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values_s, PERCENTILES) if values_s else [0.0] * len(PERCENTILES)
    return {f"p{p}": round(1e3 * float(value), 2) for p, value in zip(PERCENTILES, found, strict=True)}


def _print(found: dict[str, dict[str, Any]]) -> None:
    names = [f"{name} p{p}" for name in ("TTFT ms", "TPOT ms", "gap ms") for p in PERCENTILES]
    title = "streams, as clients see them"
    table = Table("requests/s", "requests", "failed", "tok/s", "tokens/event", *names, title=title)
    for rate, one in found.items():
        times = [f"{value:.1f}" for name in ("ttft_ms", "tpot_ms", "gap_ms") for value in one[name].values()]
        counts = (str(one["num_requests"]), str(one["num_failed"]), f"{one['tok_s']:,.0f}")
        table.add_row(rate, *counts, f"{one['tokens_per_event']:.2f}", *times)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
