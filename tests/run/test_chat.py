"""`shoal chat` against a gateway of a few lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from run.chat import Chat
from run.settings import Settings


class Gateway(BaseHTTPRequestHandler):
    """Thinks, then says how many messages it was given; fails in the middle when the last one asks for that."""

    seen: list[Any] = []

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.headers["authorization"], body))
        num = len(body["messages"])
        deltas = [{"reasoning_content": "hm. "}, {"content": f"{num} message"}, {"content": "s"}, {}]
        events: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
        if body["messages"][-1]["content"] == "fail":
            events[2:] = [{"error": {"message": "the replica was lost"}}]
        self._answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Gateway, "seen", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_conversation_goes_on_without_what_failed(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = iter(["one", "fail", "two", "/new", "three", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    settings = Settings.from_environment({"SHOAL_HOME": str(tmp_path)})
    assert Chat.open(settings, url, "", "sk-1", 9).run() == 0
    told = capsys.readouterr().out
    assert told.count("hm. 1 messages") == 2 and told.count("hm. 3 messages") == 1
    assert "the replica was lost" in told
    assert {key for key, _ in Gateway.seen} == {"Bearer sk-1"}
    bodies = [body for _, body in Gateway.seen]
    assert all((body["model"], body["max_tokens"], body["stream"]) == ("m", 9, True) for body in bodies)
    asked = [[message["content"] for message in body["messages"]] for body in bodies]
    assert asked == [["one"], ["one", "1 messages", "fail"], ["one", "1 messages", "two"], ["three"]]
