"""`shoal bench turns`: what a second turn costs, through the API of the service that runs here.

A conversation begins with a long text of its own, which nobody can have cached; its second turn brings the first one's
prompt and answer again. Time to the first token and cached tokens are what the client sees.
"""

from __future__ import annotations

import functools
import http.client
import json as json_module
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import track
from rich.table import Table

from run.home import Home
from run.settings import LOOPBACK, Settings

NUM_PROMPT_TOKENS = (1024, 4096)
NUM_ROUNDS = 5
NUM_OUTPUT_TOKENS = 32
TIMEOUT_S = 120.0


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
    settings = Settings.from_environment()
    running = Home(settings.home).read()
    client = Client(url or (running.http if running else f"http://{LOOPBACK}:{settings.http_port}"), key)
    try:
        results = {length: _measure(client, length, is_quiet=json) for length in NUM_PROMPT_TOKENS}
    except OSError as error:
        Console(stderr=True).print(f"no service at {client.url}: {error}; start one with `shoal up`", markup=False)
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


def _measure(client: Client, num_tokens: int, *, is_quiet: bool) -> dict[str, Any]:
    pairs = []
    for _ in track(range(NUM_ROUNDS + 1), f"{num_tokens} tokens", disable=is_quiet, transient=True):
        messages = [{"role": "user", "content": client.text(num_tokens)}]
        first, answer = client.ask(messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now, what else?"}]
        pairs.append((first, client.ask(messages)[0]))
    measured = pairs[1:]  # the first one warms up
    return {**_median([first for first, _ in measured]), "second": _median([second for _, second in measured])}


def _median(turns: list[Turn]) -> dict[str, Any]:
    median = sorted(turns, key=lambda turn: turn.ttft_ms)[len(turns) // 2]
    return {
        "num_prompt_tokens": round(statistics.median(turn.num_prompt_tokens for turn in turns)),
        "num_cached_tokens": round(statistics.median(turn.num_cached_tokens for turn in turns)),
        "ttft_ms": round(median.ttft_ms, 2),
    }


class Client:
    """One gateway. Blocking: nothing else happens in the time that is measured."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._random = random.Random()

    def text(self, num_tokens: int) -> str:
        """Words by chance that make a prompt of about so many tokens."""
        words = [self._word() for _ in range(num_tokens)]
        of_all = self._count(" ".join(words))
        return " ".join(words[: max(1, num_tokens * len(words) // of_all)])

    def ask(self, messages: list[dict[str, str]]) -> tuple[Turn, str]:
        """A greedy answer, streamed. Raises OSError."""
        body = {"messages": messages, "stream": True, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0}
        started_s = time.perf_counter()
        response = self._post("/v1/chat/completions", {**body, "thinking": {"type": "disabled"}})
        ttft_s, answer, usage = 0.0, "", dict[str, int]()
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json_module.loads(line[len(b"data: ") :])
            if "error" in event:
                raise OSError(event["error"]["message"])
            for choice in event["choices"]:
                answer += choice["delta"].get("content") or ""
            if answer and not ttft_s:
                ttft_s = time.perf_counter() - started_s
            usage = event.get("usage") or usage
        return Turn(usage["prompt_tokens"], usage["prompt_cache_hit_tokens"], ttft_s * 1e3), answer

    def _word(self) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=self._random.randint(2, 6)))

    def _count(self, text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}]}
        return int(json_module.load(self._post("/v1/messages/count_tokens", body))["input_tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or LOOPBACK, place.port, timeout=TIMEOUT_S)
        connection.request("POST", path, json_module.dumps({"model": self._model, **body}), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
        return response

    @functools.cached_property
    def _model(self) -> str:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or LOOPBACK, place.port, timeout=TIMEOUT_S)
        connection.request("GET", "/v1/models", headers=self._headers)
        return str(json_module.load(connection.getresponse())["data"][0]["id"])
