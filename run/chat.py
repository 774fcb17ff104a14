"""`shoal chat`: a conversation in the terminal, streamed from the gateway over HTTP and SSE."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from run.home import Home
from run.settings import LOOPBACK, Settings

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - importing it gives input() editing and history

PROMPT = "you> "
TIMEOUT_S = 300.0


class ChatError(Exception):
    """The gateway could not be reached, or refused the request."""


class Chat:
    """One conversation with one model. Blocking on purpose: Ctrl-C then ends exactly what is being waited for."""

    def __init__(self, url: str, model: str, key: str, max_tokens: int, console: Console) -> None:
        self._url = url
        self._model = model
        self._key = key
        self._max_tokens = max_tokens
        self._console = console
        self._messages: list[dict[str, str]] = []

    @classmethod
    def open(cls, settings: Settings, url: str, model: str, key: str, max_tokens: int) -> Chat:
        """Find the gateway: `url`, or that of the running stack, or the port of the settings."""
        running = Home(settings.home).read()
        place = url or (running.http if running else f"http://{LOOPBACK}:{settings.http_port}")
        return cls(place.rstrip("/"), model, key, max_tokens, Console(highlight=False))

    def run(self) -> int:
        """Read lines and answer them until /quit or the end of input; the exit status."""
        say = self._console.print
        try:
            self._model = self._model or self._first_model()
        except ChatError as error:
            say(str(error), style="red", markup=False)
            return 1
        say(f"{self._model} at {self._url}   /new starts over, /quit ends, Ctrl-C cancels an answer\n", style="dim")
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
        except ChatError as error:
            self._messages.pop()
            say(f"\n{error}\n", style="red", markup=False)
        else:
            self._messages.append({"role": "assistant", "content": "".join(parts)})

    def _stream(self) -> Iterator[tuple[str, str]]:
        """Pieces of the answer as (`content` or `reasoning_content`, text). Leaving it early hangs up: a cancel."""
        request: dict[str, Any] = {"model": self._model, "messages": self._messages, "stream": True}
        if self._max_tokens:
            request["max_tokens"] = self._max_tokens
        connection = self._connect()
        try:
            response = self._send(connection, "POST", "/v1/chat/completions", json.dumps(request))
            for data in _events(response):
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", []):
                    for kind in ("reasoning_content", "content"):
                        if text := choice.get("delta", {}).get(kind):
                            yield kind, text
        except OSError as error:
            raise ChatError(f"lost the gateway at {self._url}: {error}") from None
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            models = json.loads(self._send(connection, "GET", "/v1/models").read())
        finally:
            connection.close()
        return str(models["data"][0]["id"])

    def _connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self._url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        return kind(place.hostname or "", place.port, timeout=TIMEOUT_S)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, path, body.encode() if body is not None else None, headers)
            response = connection.getresponse()
        except OSError as error:
            raise ChatError(f"no gateway at {self._url} ({error}); start one with `shoal up`, or give --url") from None
        if response.status != 200:
            raise ChatError(_message(response.status, response.read()))
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events, up to `[DONE]`."""
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield data


def _message(status: int, body: bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        return f"{status}: {error['message'] if isinstance(error, dict) else error}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:300].decode('utf-8', 'replace')}"
