"""The gateway, as `shoal chat`, `shoal bench turns` and `shoal eval` ask it: HTTP and SSE."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from run.home import Home
from run.settings import LOOPBACK, Settings, SettingsError

TIMEOUT_S = 300.0


class GatewayError(Exception):
    """The gateway could not be reached, or refused the request. One line, for the user."""


class GatewayClient:
    """One gateway. Blocking on purpose: Ctrl-C ends exactly what is being waited for, and nothing else takes time.

    `url` by default that of the stack that runs from SHOAL_HOME, else port SHOAL_HTTP_PORT here. Raises SettingsError
    when it is no address.
    """

    def __init__(self, settings: Settings, url: str, key: str) -> None:
        running = Home(settings.home).read()
        self.url = (url or (running.http if running else f"http://{LOOPBACK}:{settings.http_port}")).rstrip("/")
        try:
            place = urlsplit(self.url)
            self._host, self._port = place.hostname or "", place.port
        except ValueError:  # of the port
            place, self._host = urlsplit(""), ""
        if not self._host or place.scheme not in ("http", "https"):
            raise SettingsError(f"--url {url}: not an address of a gateway; give it as http://{LOOPBACK}:8000")
        self._connection = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def first_model(self) -> str:
        """The first one it serves. Raises GatewayError."""
        try:
            return str(self.ask("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise GatewayError(f"what answers at {self.url} serves no model") from None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer. Raises GatewayError."""
        with closing(self._connect()) as connection:
            return self._decode(self._send(connection, method, path, body).read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed answer, without the last one that only says so. Closing it early hangs up, which
        cancels. Raises GatewayError, also for an error among the events."""
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, body)
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        event = self._decode(data)
                        if "error" in event:
                            raise GatewayError(str(event["error"].get("message", event["error"])))
                        yield event
            except (OSError, http.client.HTTPException) as error:
                raise GatewayError(f"lost the gateway at {self.url}: {error}") from None

    def _connect(self) -> http.client.HTTPConnection:
        return self._connection(self._host, self._port, timeout=TIMEOUT_S)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode(), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(
                f"no gateway at {self.url} ({error}); start one with `shoal up`, or give --url"
            ) from None
        if response.status == 401 and "authorization" not in self._headers:
            raise GatewayError(f"the gateway at {self.url} asks for an API key; give one with --key")
        if response.status != 200:
            raise GatewayError(f"the gateway at {self.url} answers {response.status}: {_message(response.read())}")
        return response

    def _decode(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise GatewayError(f"what answers at {self.url} is no gateway: it does not speak JSON") from None


def _message(body: bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
