"""One trace per request over all components, and the GenAI metrics, through the real exporter interfaces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from msgspec import structs
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.gateway.actor import Gateway
from actors.recipe.card import ModelCard
from bus.metrics import record_load
from kernels.timed import StepCost
from run.settings import DEFAULT_MODEL
from run.simulator import World, engine_for
from schemas.message import Role
from schemas.routing import LoadReported

TREE = """\
gateway
  recipe
    entrypoint
      route prefill
      prefill
        prefill queue
        prefill compute
        hand over
          route decode
          decode
"""


@pytest.fixture(scope="module")
def exporters() -> Iterator[tuple[InMemorySpanExporter, InMemoryMetricReader]]:
    """The providers are global and can be set once; after this module they record nothing more."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(meters)
    yield spans, reader
    tracers.shutdown()
    meters.shutdown()


async def one_request(stream: bool) -> httpx.Response:
    world = World(seed=0)
    card = ModelCard.from_folder(DEFAULT_MODEL)
    await world.add_balancers()
    await world.add_prefill("p0", engine_for(card, 2048, StepCost()))
    await world.add_decode("d0", engine_for(card, 2048, StepCost()))
    await world.add_entrypoint("e0")
    await world.add_recipe("r0", card)
    gateway = Gateway("g0", await world.bus("gateway/g0"), await world.bulk("gateway/g0"), port=0)
    await world.add(gateway)
    body = {"model": card.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stream": stream}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=body)
    await world.stop()
    return answer


def tree(spans: tuple[ReadableSpan, ...]) -> str:
    """Names, indented by depth, siblings in the order they started."""
    ordered = sorted(spans, key=lambda span: span.start_time or 0)

    def lines(parent: int | None, depth: int) -> list[str]:
        found = []
        for span in ordered:
            if (span.parent.span_id if span.parent else None) == parent:
                assert span.context is not None
                found += ["  " * depth + span.name, *lines(span.context.span_id, depth + 1)]
        return found

    return "\n".join(lines(None, 0)) + "\n"


@pytest.mark.parametrize("stream", [True, False])
def test_one_request_is_one_tree(exporters: tuple[InMemorySpanExporter, InMemoryMetricReader], stream: bool) -> None:
    spans, reader = exporters
    spans.clear()
    assert asyncio.run(one_request(stream)).status_code == 200
    finished = spans.get_finished_spans()
    assert tree(finished) == TREE
    by_name = {span.name: dict(span.attributes or {}) for span in finished}
    assert by_name["recipe"]["gen_ai.request.model"] == "shoal-tiny"
    assert by_name["recipe"]["gen_ai.usage.output_tokens"] == by_name["decode"]["gen_ai.usage.output_tokens"] == 5
    assert by_name["decode"]["gen_ai.response.finish_reasons"] == ("length",)
    assert by_name["prefill"]["shoal.replica"] == "p0"


def test_metrics_have_the_conventions_names(exporters: tuple[InMemorySpanExporter, InMemoryMetricReader]) -> None:
    _, reader = exporters
    asyncio.run(one_request(True))
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics}
    assert {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
        "shoal.cache.hit_tokens",
    } <= found


def test_what_actors_say_of_their_load_are_gauges(
    exporters: tuple[InMemorySpanExporter, InMemoryMetricReader],
) -> None:
    _, reader = exporters
    report = LoadReported(role=Role.PREFILL, id="p9", incarnation="i", seq=1, pid=1, host="h", num_waiting=3)
    record_load(structs.replace(report, detail={"cost_residual": 0.04, "remaining_ns": 7e9, "remaining_ns:acme": 7e9}))
    data = reader.get_metrics_data()
    assert data is not None
    points = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    if isinstance(point, NumberDataPoint) and (point.attributes or {}).get("shoal.replica") == "p9":
                        points[metric.name] = point.value
    assert points == {
        "shoal.load.running": 0,
        "shoal.load.waiting": 3,
        "shoal.load.tokens": 0,
        "shoal.load.cost_residual": 0.04,
        "shoal.load.remaining_ns": 7e9,
    }
