"""`shoal chat`: a conversation in the terminal, streamed from the gateway over HTTP and SSE."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from run.client import GatewayClient, GatewayError
from run.settings import Settings

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - importing it gives input() editing and history

PROMPT = "you> "


class Chat:
    """One conversation with one model."""

    def __init__(self, client: GatewayClient, model: str, max_tokens: int, console: Console) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._console = console
        self._messages: list[dict[str, str]] = []

    @classmethod
    def open(cls, settings: Settings, url: str, model: str, key: str, max_tokens: int) -> Chat:
        """Talk to the gateway at `url`, by default to the one that runs here. Raises SettingsError."""
        return cls(GatewayClient(settings, url, key), model, max_tokens, Console(highlight=False))

    def run(self) -> int:
        """Read lines and answer them until /quit or the end of input; the exit status."""
        say = self._console.print
        try:
            self._model = self._model or self._client.first_model()
        except GatewayError as error:
            say(str(error), style="red", markup=False)
            return 1
        place = f"{self._model} at {self._client.url}"
        say(f"{place}   /new starts over, /quit ends, Ctrl-C cancels an answer\n", style="dim")
        while True:
            try:
                line = input(PROMPT).strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                say()
                return 0
            if line == "/quit":
                return 0
            if line == "/new":
                self._messages.clear()
            elif line.startswith("/") and " " not in line:
                say("/new starts over, /quit ends, Ctrl-C cancels an answer", style="dim")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream the answer to one line. A cancelled or failed one leaves the conversation as it was before."""
        say = self._console.print
        self._messages.append({"role": "user", "content": line})
        parts: list[str] = []
        try:
            for kind, text in self._stream():
                say(text, end="", style="dim" if kind == "reasoning_content" else None, markup=False, soft_wrap=True)
                if kind == "content":
                    parts.append(text)
            say("\n")
        except KeyboardInterrupt:
            self._messages.pop()
            say("\n(cancelled)\n", style="yellow")
        except GatewayError as error:
            self._messages.pop()
            say(f"\n{error}\n", style="red", markup=False)
        else:
            self._messages.append({"role": "assistant", "content": "".join(parts)})

    def _stream(self) -> Iterator[tuple[str, str]]:
        """Pieces of the answer as (`content` or `reasoning_content`, text). Leaving it early hangs up: a cancel."""
        request: dict[str, Any] = {"model": self._model, "messages": self._messages, "stream": True}
        if self._max_tokens:
            request["max_tokens"] = self._max_tokens
        with contextlib.closing(self._client.stream("/v1/chat/completions", request)) as events:
            for event in events:
                for choice in event.get("choices", []):
                    for kind in ("reasoning_content", "content"):
                        if text := choice.get("delta", {}).get(kind):
                            yield kind, text
