"""One trace per request across all processes, as a collector sees it: a question to the bundled model by each SDK."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from run.settings import DEFAULT_MODEL
from tests.stack.conftest import System

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"


class Span(NamedTuple):
    process: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes


class Collector:
    """An OTLP endpoint that keeps the spans it gets, and knows whether metrics came too."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        if path != "/v1/traces":
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (span.trace_id, span.span_id, span.parent_span_id)
                self.spans.append(Span(names["service.name"], span.name, *ids))


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def test_one_request_is_one_trace_through_every_process(collector: Collector, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{collector.server.server_port}"
    system = System(tmp_path, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "SHOAL_MODEL": str(DEFAULT_MODEL)})
    try:
        talk(system)
    finally:
        system.stop()  # which sends what is left

    decodes = [span for span in collector.spans if span.name == "decode"]
    assert len({decode.trace for decode in decodes}) == 4
    for decode in decodes:
        ours = {span.id: span for span in collector.spans if span.trace == decode.trace}
        # The SDKs have spans of their own in a process that traces; those are not ours.
        parents = {id: ours[span.parent].name if span.parent in ours else "" for id, span in ours.items()}
        tree = {(parents[span.id], span.name, span.process) for span in ours.values()}
        assert tree == {
            ("", "gateway", "shoal-front"),
            ("gateway", "recipe", "shoal-front"),
            ("recipe", "entrypoint", "shoal-front"),
            ("entrypoint", "route prefill", "shoal-front"),
            ("entrypoint", "prefill", "shoal-prefill"),
            ("prefill", "prefill queue", "shoal-prefill"),
            ("prefill", "prefill compute", "shoal-prefill"),
            ("prefill", "hand over", "shoal-prefill"),
            ("hand over", "route decode", "shoal-front"),
            ("hand over", "decode", "shoal-decode"),
        }
    assert "/v1/metrics" in collector.paths


def talk(system: System) -> None:
    """A conversation of two turns, and one question in each of the other protocols; what is said is not looked at."""
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
        first = ai.chat.completions.create(model=MODEL, messages=said, max_tokens=20).choices[0]
        assert first.finish_reason in ("stop", "length")
        said += [{"role": "assistant", "content": first.message.content}, {"role": "user", "content": "Who are you?"}]
        chunks = ai.chat.completions.create(model=MODEL, messages=said, max_tokens=20, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
        answer = ai.responses.create(model=MODEL, input="What can you do?", max_output_tokens=20)
        assert answer.status in ("completed", "incomplete")
    with anthropic.Anthropic(base_url=system.http, api_key="none", max_retries=0) as sdk:
        message = sdk.messages.create(model=MODEL, messages=said[-1:], max_tokens=20)
        assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens <= 20
