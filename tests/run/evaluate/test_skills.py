"""`shoal eval` against a gateway of a few lines: what it asks, and how it counts what comes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from run.evaluate import questions
from run.evaluate.command import drafts, replay, skills
from run.settings import SettingsError
from run.train.example import Example

CALL = {"name": "buy", "arguments": '{"number": 84}'}


def request(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}}


def recall(rng: random.Random, num_tokens: int) -> Example:
    depth = rng.random()
    return Example("recall", request(f"recall {num_tokens} {depth}"), {"content": "yes"}, depth)


def transform(rng: random.Random, num_tokens: int) -> Example:
    return Example("transform", request(f"transform {rng.choice(['right', 'leaks', 'fails'])}"), {"content": "yes"})


def tools(rng: random.Random, num_tokens: int) -> Example:
    body = request("tools") | {"tools": [{"type": "function", "function": {"name": "buy"}}]}
    return Example("tools", body, {"content": "", "tool_calls": [{"type": "function", "function": CALL}]})


def extraction(rng: random.Random, num_tokens: int) -> Example:
    return Example("json", request("json"), {"content": '{"a": 1}'})


class Gateway(BaseHTTPRequestHandler):
    """Answers as the question says: recall is wrong in the first tenth, and when exact in the last one instead."""

    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": model} for model in self.server.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        kind, *rest = body["messages"][0]["content"].split()
        deltas: list[dict[str, Any]] = [{"content": "y"}, {"content": "es"}]
        finish = "stop"
        if kind == "recall":
            part = int(10 * float(rest[1]))
            deltas = [{"content": "no"}] if part == (9 if body.get("exact") else 0) else deltas
        elif kind == "tools":
            pieces = [{"name": "buy", "arguments": ""}, {"arguments": '{"number"'}, {"arguments": ": 84}"}]
            deltas, finish = [{"tool_calls": [{"index": 0, "function": piece}]} for piece in pieces], "tool_calls"
        elif kind == "json":
            deltas = [{"content": '{"a": 2}'}]
        elif rest == ["leaks"]:
            deltas, finish = [{"reasoning_content": "</think>"}, *deltas], "length"
        elif rest == ["fails"]:
            self._send(503, json.dumps({"error": {"message": "overloaded"}}))
            return
        usage = {"prompt_tokens": 200, "completion_tokens": 3, "prompt_cache_hit_tokens": 128}
        events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": finish}], "usage": usage})
        self._send(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Gateway)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.models = ["m"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    for name in ("SHOAL_HTTP_PORT", "SHOAL_MODEL", "SHOAL_TENANTS", "SHOAL_STORE_MB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    tasks = {"recall": recall, "transform": transform, "tools": tools, "extraction": extraction}
    monkeypatch.setattr(questions, "TASKS", tasks)
    monkeypatch.setattr(questions, "HELD_OUT", tasks)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_counts_what_comes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert skills(url=server.url, num=2, exact=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "m" and found["split"] == "held-out"
    rows = {(row["skill"], row.get("part")): row for row in found["skills"]}
    for length in ("1,000", "4,000"):
        whole = rows[f"recall {length}", None]
        assert (whole["num"], whole["percent"], whole["cached_percent"]) == (20, 90.0, 64.0)
        parts = [rows[f"recall {length}", part] for part in range(10)]
        assert [part["num"] for part in parts] == [2] * 10
        assert [part["percent"] for part in parts] == [0.0] + [100.0] * 9
    assert rows["tools", None]["percent"] == 100 and not rows["tools", None]["not_ended"]
    assert rows["json valid", None]["percent"] == 100 and rows["json correct", None]["percent"] == 0
    assert whole["ttft_ms"] > 0 and whole["answer_tokens"] == 3
    for row in found["exact"]:
        assert (row["num"], row["percent"]) == (20, 80.0)
        assert row["replay_percent"] == row["exact_percent"] == 90.0
    greedy = {"temperature": 0, "stream": True, "model": "m", "max_tokens": 512, "thinking": {"type": "disabled"}}
    assert all(body.items() >= greedy.items() for body in server.bodies)
    exact = [body["messages"] for body in server.bodies if body.get("exact")]
    recalled = [body["messages"] for body in server.bodies if body["messages"][0]["content"].startswith("recall")]
    assert len(exact) == 40 and len(recalled) == 80 and all(recalled.count(messages) == 2 for messages in exact)


def test_trouble_is_told_in_the_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert skills(url=server.url, num=30, tasks="transform") == 1
    told = capsys.readouterr()
    kinds = [body["messages"][0]["content"].split()[1] for body in server.bodies]
    row = next(line for line in told.out.splitlines() if line.startswith("transform"))
    leaks, fails = kinds.count("leaks"), kinds.count("fails")
    assert leaks and fails and f"{leaks} length, {leaks} leaks, {fails} failed" in row
    assert f"{100 * (30 - fails) / 30:.1f}" in row
    assert told.err.count("overloaded") == 1
    skills(url=server.url, num=30, tasks="transform", json=True)
    told = capsys.readouterr()
    assert json.loads(told.out)["skills"][0]["num_failed"] == fails and told.err.count("overloaded") == 1


def test_other_examples_are_asked_from_another_index_or_split(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    for arguments in ({}, {"first": 0}, {"first": 100}, {"split": "train"}):
        server.bodies.clear()
        skills(url=server.url, num=1, tasks="recall", json=True, **arguments)
        asked.append({body["messages"][0]["content"] for body in server.bodies})
    assert asked[0] == asked[1] and len(asked[0] | asked[2] | asked[3]) == 60
    depths = {content.split()[2] for contents in asked for content in contents}
    assert len(depths) == 60, "notes of one length are others than those of the other"


def test_mistakes_are_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="there is no 'magic'; there are recall, transform"):
        skills(url=server.url, tasks="recall,magic")
    with pytest.raises(SettingsError, match="must be positive"):
        skills(url=server.url, num=0)
    with pytest.raises(SettingsError, match="--first -1"):
        skills(url=server.url, first=-1)
    assert skills(url="http://127.0.0.1:9") == 1
    server.models = []
    assert skills(url=server.url) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "no gateway at http://127.0.0.1:9" in said[0] and "serves no model" in said[1]


def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    for command in (drafts, replay):
        with pytest.raises(SettingsError, match="config.json: not found"):
            command(tmp_path, num=1)
