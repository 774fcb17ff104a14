"""`shoal bench turns` against a gateway of a few lines: its figures, and its mistakes in one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from run.bench import turns
from run.settings import SettingsError

NUM_CACHED = 896


class Gateway(BaseHTTPRequestHandler):
    """Counts two tokens a word; second turns come with NUM_CACHED cached tokens."""

    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "m"
        num_tokens = sum(2 * len(message["content"].split()) for message in body["messages"])
        if self.path == "/v1/messages/count_tokens":
            self._json({"input_tokens": num_tokens})
            return
        self.server.bodies.append(body)
        num_cached = NUM_CACHED if len(body["messages"]) > 1 else 0
        usage = {"prompt_tokens": num_tokens, "prompt_cache_hit_tokens": num_cached}
        if self.server.breaks:
            self._events({"error": {"message": "the replica was lost"}})
        else:
            choices = [{"delta": {"content": "well"}}]
            self._events({"choices": choices}, {"choices": [], "usage": usage})

    def _json(self, answer: Any) -> None:
        status, text = self.server.refusal or (200, json.dumps(answer))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def _events(self, *events: Any) -> None:
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Gateway)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None
        self.breaks = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    for name in ("SHOAL_HTTP_PORT", "SHOAL_MODEL", "SHOAL_TENANTS", "SHOAL_STORE_MB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(turns, "NUM_ROUNDS", 2)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_prints_one_object(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert turns.bench_turns(url=server.url, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["1024", "4096"]
    for length, first in found.items():
        assert first["num_prompt_tokens"] == int(length) and first["num_cached_tokens"] == 0
        second = first["second"]
        assert second["num_prompt_tokens"] == int(length) + 2 * len("well And now, what else?".split())
        assert second["num_cached_tokens"] == NUM_CACHED
        assert first["ttft_ms"] > 0 and second["ttft_ms"] > 0
    firsts = [body for body in server.bodies if len(body["messages"]) == 1]
    seconds = [body for body in server.bodies if len(body["messages"]) == 3]
    assert len(firsts) == len(seconds) == 2 * (2 + 1), "one round warms up"
    assert len({body["messages"][0]["content"] for body in firsts}) == len(firsts), "nobody can have cached any of them"
    assert [body["messages"][0] for body in seconds] == [body["messages"][0] for body in firsts]
    assert all(body["temperature"] == 0 and body["stream"] for body in server.bodies)


def test_it_prints_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert turns.bench_turns(url=server.url + "/") == 0
    told = capsys.readouterr().out
    assert "1,024" in told and "4,096" in told and str(NUM_CACHED) in told and "2 conversations" in told


@pytest.mark.parametrize(
    ("refusal", "key", "said"),
    [
        ((401, '{"error": {"message": "no"}}'), "", "asks for an API key; give one with --key"),
        ((401, '{"error": {"message": "unknown key"}}'), "sk-x", "answers 401: unknown key"),
        ((429, '{"error": {"message": "over its limit"}}'), "", "answers 429: over its limit"),
        ((502, "<html>bad gateway</html>"), "", "answers 502: <html>bad gateway</html>"),
        ((200, "<html>welcome</html>"), "", "is no gateway"),
    ],
)
def test_what_the_gateway_refuses_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], refusal: tuple[int, str], key: str, said: str
) -> None:
    server.refusal = refusal
    assert turns.bench_turns(url=server.url, key=key) == 1
    told = capsys.readouterr().err
    assert said in told and server.url in told and told.count("\n") == 1 and "shoal up" not in told


def test_an_answer_that_breaks_off_is_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.breaks = True
    assert turns.bench_turns(url=server.url, json=True) == 1
    assert capsys.readouterr().err == "shoal: the replica was lost\n"


def test_without_a_gateway_it_says_what_to_do(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_HTTP_PORT", "9")
    assert turns.bench_turns() == 1
    told = capsys.readouterr().err
    assert "no gateway at http://127.0.0.1:9" in told and "`shoal up`" in told and told.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8300", "localhost:8300", "ftp://localhost", "http://", "http://host:port"])
def test_what_is_no_address_is_not_asked(server: Server, url: str) -> None:
    with pytest.raises(SettingsError, match=f"--url {url}: not an address"):
        turns.bench_turns(url=url)
