"""The SDK's set-up, in processes of its own: what it sets is global."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from bus import metrics

USE = """
import sys
from opentelemetry import trace
from bus import metrics
from run.telemetry import start_telemetry

stop = start_telemetry("front")
with trace.get_tracer("shoal").start_as_current_span("gateway"):
    metrics.request_duration().record(0.5, metrics.attributes("m"))
stop()
print("opentelemetry.sdk.trace" in sys.modules)
"""


def use(endpoint: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    if endpoint:
        environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
    return subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=True, timeout=50
    ).stdout.strip()


@contextlib.contextmanager
def collector(answers: threading.Event) -> Iterator[tuple[str, dict[str, bytes]]]:
    """An OTLP endpoint and the bodies it got, by path. It answers once it may."""
    bodies: dict[str, bytes] = {}

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies[self.path] = self.rfile.read(int(self.headers["content-length"]))
            answers.wait()
            self.send_response(200)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_an_endpoint_the_sdk_is_not_even_imported() -> None:
    assert use("") == "False"


def test_what_was_recorded_arrives_before_the_end() -> None:
    may_answer = threading.Event()
    may_answer.set()
    with collector(may_answer) as (endpoint, bodies):
        assert use(endpoint) == "True"
    assert set(bodies) == {"/v1/traces", "/v1/metrics"}
    assert b"shoal-front" in bodies["/v1/traces"] and b"gateway" in bodies["/v1/traces"]
    assert b"gen_ai.server.request.duration" in bodies["/v1/metrics"]


def test_an_endpoint_that_does_not_answer_does_not_hold_up_the_end() -> None:
    with collector(threading.Event()) as (endpoint, bodies):
        assert use(endpoint) == "True"
    assert "/v1/traces" in bodies


def test_buckets_are_those_of_the_conventions() -> None:
    assert metrics.DURATION_BUCKETS[0] == 0.01 and abs(metrics.DURATION_BUCKETS[-1] - 81.92) < 1e-9
    assert metrics.USAGE_BUCKETS[-1] == 67_108_864
    assert metrics.attributes("m", error="overloaded") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": "m",
        "error.type": "overloaded",
    }
