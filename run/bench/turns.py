"""`shoal bench turns`: what a second turn costs, through the API of the service that runs here.

A conversation begins with a long text of its own, which nobody can have cached; its second turn brings the first one's
prompt and answer again. Time to the first token and cached tokens are what the client sees.
"""

from __future__ import annotations

import json as json_module
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from run.client import GatewayClient, GatewayError
from run.settings import Settings

NUM_PROMPT_TOKENS = (1024, 4096)
NUM_ROUNDS = 5
NUM_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its prompt, what of it was cached, and the time to its first token."""

    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_ms: float


def bench_turns(*, url: str = "", key: str = "", json: bool = False) -> int:
    """Measure and print; with `json` one object, else a table.

    Parameters
    ----------
    url
        Where the gateway is; by default that of the stack that runs from SHOAL_HOME, else port SHOAL_HTTP_PORT here.
    key
        An API key, if the gateway asks for one.
    json
        Print one JSON object instead of a table.
    """
    client = GatewayClient(Settings.from_environment(), url, key)
    try:
        talker = Talker(client, client.first_model())
        results = {length: _measure(talker, length, is_quiet=json) for length in NUM_PROMPT_TOKENS}
    except GatewayError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    if json:
        print(json_module.dumps({str(length): result for length, result in results.items()}))
        return 0
    table = Table(
        *("prompt", "first turn TTFT ms", "second turn", "cached", "TTFT ms", "of the first"),
        title=f"time to the first token, median of {NUM_ROUNDS} conversations",
    )
    for first in results.values():
        second = first["second"]
        share = second["ttft_ms"] / first["ttft_ms"]
        table.add_row(
            *(f"{first['num_prompt_tokens']:,}", f"{first['ttft_ms']:.0f}", f"{second['num_prompt_tokens']:,}"),
            *(f"{second['num_cached_tokens']:,}", f"{second['ttft_ms']:.0f}", f"{share:.2f}"),
        )
    Console().print(table)
    return 0


def _measure(talker: Talker, num_tokens: int, *, is_quiet: bool) -> dict[str, Any]:
    pairs = []
    for _ in track(range(NUM_ROUNDS + 1), f"{num_tokens} tokens", disable=is_quiet, transient=True):
        messages = [{"role": "user", "content": talker.text(num_tokens)}]
        first, answer = talker.ask(messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now, what else?"}]
        pairs.append((first, talker.ask(messages)[0]))
    measured = pairs[1:]  # the first one warms up
    return {**_median([first for first, _ in measured]), "second": _median([second for _, second in measured])}


def _median(turns: list[Turn]) -> dict[str, Any]:
    median = sorted(turns, key=lambda turn: turn.ttft_ms)[len(turns) // 2]
    return {
        "num_prompt_tokens": round(statistics.median(turn.num_prompt_tokens for turn in turns)),
        "num_cached_tokens": round(statistics.median(turn.num_cached_tokens for turn in turns)),
        "ttft_ms": round(median.ttft_ms, 2),
    }


class Talker:
    """Has conversations with one model that nobody had before."""

    def __init__(self, client: GatewayClient, model: str) -> None:
        self._client = client
        self._model = model
        self._random = random.Random()

    def text(self, num_tokens: int) -> str:
        """Words by chance that make a prompt of about so many tokens. Raises GatewayError."""
        words = [self._word() for _ in range(num_tokens)]
        body = {"model": self._model, "messages": [{"role": "user", "content": " ".join(words)}]}
        of_all = int(self._client.ask("POST", "/v1/messages/count_tokens", body)["input_tokens"])
        return " ".join(words[: max(1, num_tokens * len(words) // of_all)])

    def ask(self, messages: list[dict[str, str]]) -> tuple[Turn, str]:
        """A greedy answer, streamed. Raises GatewayError."""
        body = {"messages": messages, "stream": True, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0}
        started_s = time.perf_counter()
        ttft_s, answer, usage = 0.0, "", dict[str, int]()
        for event in self._client.stream(
            "/v1/chat/completions", {"model": self._model, "thinking": {"type": "disabled"}, **body}
        ):
            for choice in event["choices"]:
                answer += choice["delta"].get("content") or ""
            if answer and not ttft_s:
                ttft_s = time.perf_counter() - started_s
            usage = event.get("usage") or usage
        return Turn(usage["prompt_tokens"], usage["prompt_cache_hit_tokens"], ttft_s * 1e3), answer

    def _word(self) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=self._random.randint(2, 6)))
