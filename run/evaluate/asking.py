"""Questions to a gateway, a few at once, and what a client sees of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from run.client import GatewayClient, GatewayError
from run.evaluate.questions import Question
from run.train.judge import is_correct, parse_json

LEAKS = ("｜", "<think>", "</think>", "DSML")
"""What is in no answer unless a control sequence, or a half of one, has come through."""
ENDED = ("stop", "tool_calls")


@dataclass(slots=True)
class Answer:
    """What came for one question. `failure` says why nothing did, or not all of it.

    `took_s`: from the first token to the end. `num_tokens` of the answer and its reasoning.
    """

    question: Question
    message: dict[str, Any] = field(default_factory=dict)
    finish: str = ""
    ttft_s: float = 0.0
    took_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str = ""

    @property
    def is_correct(self) -> bool:
        return not self.failure and is_correct(self.question.example, self.message)

    @property
    def is_json(self) -> bool:
        return not self.failure and parse_json(self.message["content"]) is not None

    @property
    def leaks(self) -> bool:
        texts = [self.message.get("content", ""), self.message.get("reasoning_content", "")]
        for call in self.message.get("tool_calls", ()):
            texts += call["function"].values()
        return any(leak in text for leak in LEAKS for text in texts)


class Asker:
    """Asks one model greedily, streamed. Safe to use from threads."""

    def __init__(self, client: GatewayClient, model: str, max_tokens: int) -> None:
        self._client = client
        self._settings = {"model": model, "stream": True, "temperature": 0, "max_tokens": max_tokens}

    def ask(self, question: Question, *, exact: bool = False) -> Answer:
        """The answer, judged by nobody yet; `exact` asks for it without bounded replay and without cached blocks."""
        answer, tool_calls = Answer(question), dict[int, dict[str, Any]]()
        message: dict[str, Any] = {"content": "", "reasoning_content": ""}
        body = {**question.example.request, **self._settings, **({"exact": True} if exact else {})}
        started_s = time.perf_counter()
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                answer.ttft_s = answer.ttft_s or time.perf_counter() - started_s  # nothing comes before the first token
                for choice in event["choices"]:
                    _add(message, tool_calls, choice.get("delta", {}))
                    answer.finish = choice.get("finish_reason") or answer.finish
                usage = event.get("usage") or {}
                answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)
                answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
                answer.num_cached_tokens = usage.get("prompt_cache_hit_tokens", answer.num_cached_tokens)
        except GatewayError as error:
            answer.failure = str(error)
        answer.took_s = time.perf_counter() - started_s - answer.ttft_s
        answer.message = message | ({"tool_calls": list(tool_calls.values())} if tool_calls else {})
        return answer

    def ask_all(
        self, questions: Sequence[Question], at_once: int, told: Callable[[], None], *, exact: bool = False
    ) -> list[Answer]:
        """The answers in the order of the questions; `told` is called as each comes."""
        with ThreadPoolExecutor(at_once) as threads:
            asked = [threads.submit(self.ask, question, exact=exact) for question in questions]
            try:
                for _ in as_completed(asked):
                    told()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)  # else Ctrl-C would wait for all that are left
                raise
        return [one.result() for one in asked]


def _add(message: dict[str, Any], tool_calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    """What an event adds to the message; the pieces of a tool call come one after the other, under its index."""
    for kind in ("content", "reasoning_content"):
        message[kind] += delta.get(kind) or ""
    for piece in delta.get("tool_calls") or ():
        call = tool_calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
        for kind, text in piece.get("function", {}).items():
            call["function"][kind] += text or ""
