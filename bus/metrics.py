"""The GenAI metrics, defined once: names, units and buckets of the OpenTelemetry conventions; and those of our own.

Source: open-telemetry/semantic-conventions-genai, status Development, as of September 2026 (spec bus.md §3.1).
Instruments come from the OpenTelemetry API, so recording costs nothing until `run/telemetry.py` sets the SDK up.
Record once per request, never per token: a histogram record costs about 8 µs.
"""

from __future__ import annotations

from functools import cache

from opentelemetry import metrics
from opentelemetry.metrics import Counter, Histogram
from opentelemetry.metrics import _Gauge as Gauge

from schemas.routing import LoadReported

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
TOKEN_TYPE = "gen_ai.token.type"
ERROR_TYPE = "error.type"

DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
USAGE_BUCKETS = tuple(4.0**i for i in range(14))


def attributes(model: str, *, error: str = "") -> dict[str, str]:
    """The attributes every GenAI metric must carry; `error` is the failure code of a request that did not finish."""
    required = {OPERATION: "chat", PROVIDER: "shoal", REQUEST_MODEL: model}
    return required | {ERROR_TYPE: error} if error else required


@cache
def request_duration() -> Histogram:
    """Seconds from a request's arrival to its terminal event."""
    return _histogram("gen_ai.server.request.duration", "s", "Duration of a request", DURATION_BUCKETS)


@cache
def time_to_first_token() -> Histogram:
    """Seconds from a request's arrival to its first token; requests that succeeded only."""
    name = "gen_ai.server.time_to_first_token"
    return _histogram(name, "s", "Time to the first token, queueing and prefill included", FIRST_TOKEN_BUCKETS)


@cache
def time_per_output_token() -> Histogram:
    """(duration - time to first token) / (output tokens - 1), in seconds; requests that succeeded only."""
    name = "gen_ai.server.time_per_output_token"
    return _histogram(name, "s", "Time per output token after the first", OUTPUT_TOKEN_BUCKETS)


@cache
def token_usage() -> Histogram:
    """Tokens of a request; with TOKEN_TYPE `input` or `output`."""
    return _histogram("gen_ai.client.token.usage", "{token}", "Tokens of a request", USAGE_BUCKETS)


@cache
def cached_tokens() -> Counter:
    """Tokens of prompts that were not computed: their KV was in the cache. A part of `input` in `token_usage`."""
    return metrics.get_meter("shoal").create_counter("shoal.cache.hit_tokens", "{token}", "Cached tokens of prompts")


def record_request(
    model: str,
    *,
    duration_s: float,
    first_token_s: float,
    num_input: int,
    num_cached: int,
    num_output: int,
    error: str = "",
) -> None:
    """Record all of the above for one request that has ended. `first_token_s` counts from its arrival; 0 for none."""
    labels = attributes(model, error=error)
    request_duration().record(duration_s, labels)
    token_usage().record(num_input, labels | {TOKEN_TYPE: "input"})
    token_usage().record(num_output, labels | {TOKEN_TYPE: "output"})
    cached_tokens().add(num_cached, labels)
    if not error and first_token_s:
        time_to_first_token().record(first_token_s, labels)
        if num_output > 1:
            time_per_output_token().record((duration_s - first_token_s) / (num_output - 1), labels)


def record_load(report: LoadReported) -> None:
    """What an actor says of its load, as gauges: `shoal.load.running`, `.waiting`, `.tokens`, and one for each number
    of its detail, such as `shoal.load.cost_residual`, but for those by tenant (`name:tenant`): a gauge keeps its last
    value, and of a tenant that has left nothing is said any more.
    """
    labels = {"shoal.role": str(report.role), "shoal.replica": report.id}
    for name, number in (
        ("running", report.num_running),
        ("waiting", report.num_waiting),
        ("tokens", report.num_tokens),
        *report.detail.items(),
    ):
        if ":" not in name:
            _load(name).set(number, labels)


@cache
def _load(name: str) -> Gauge:
    return metrics.get_meter("shoal").create_gauge(f"shoal.load.{name}", description="As in load reports")


def _histogram(name: str, unit: str, description: str, buckets: tuple[float, ...]) -> Histogram:
    return metrics.get_meter("shoal").create_histogram(
        name, unit=unit, description=description, explicit_bucket_boundaries_advisory=list(buckets)
    )
