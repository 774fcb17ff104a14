"""OpenTelemetry, switched on by OTEL_EXPORTER_OTLP_ENDPOINT: traces and metrics over OTLP/HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
FLUSH_TIMEOUT_S = 1.0


def start_telemetry(process: str) -> Callable[[], None]:
    """Set the SDK up for this process, as service `shoal-<process>`, if an endpoint is configured.

    Returns what to call at the end: it sends what is left, within FLUSH_TIMEOUT_S, reachable endpoint or not. Without
    an endpoint neither the SDK nor an exporter is imported. All other OTEL_* variables count as the SDK documents them.
    """
    if not os.environ.get(ENDPOINT):
        return lambda: None
    from opentelemetry import metrics, trace
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"shoal-{process}", "service.namespace": "shoal"})
    # Not at exit: the SDK's own hooks would wait for a dead endpoint far longer than the stack may take to stop.
    tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(tracer_provider)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    meter_provider = MeterProvider(resource=resource, metric_readers=[reader], shutdown_on_exit=False)
    metrics.set_meter_provider(meter_provider)

    def stop() -> None:
        flushes = [
            threading.Thread(target=shutdown, name="telemetry-flush", daemon=True)
            for shutdown in (tracer_provider.shutdown, meter_provider.shutdown)
        ]
        for flush in flushes:
            flush.start()
        for flush in flushes:
            flush.join(FLUSH_TIMEOUT_S)

    return stop
