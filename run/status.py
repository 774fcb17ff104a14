"""`shoal status`: who runs, where, and how loaded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.table import Table

from bus.bus import BusError
from run.health import collect_loads, on_bus
from run.home import find_broker
from run.settings import Settings
from schemas.message import Role
from schemas.routing import LoadReported

WAIT_S = 0.5
PIPE_COLUMNS = 200
"""Where there is no terminal, nothing is cut off."""


def print_status(settings: Settings, *, as_json: bool) -> int:
    """Ask everyone and print what came; status 1 when nobody answered. Raises SettingsError without a broker to ask."""
    nats_url = find_broker(settings)
    try:
        reports = asyncio.run(_collect(nats_url))
    except BusError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    if as_json:
        actors = [msgspec.structs.asdict(report) for report in reports]  # with the zeros that messages leave out
        print(msgspec.json.encode({"actors": actors}).decode())
    elif reports:
        console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
        console.print(_table(reports))
        if cached := _cached(reports):
            console.print(f"\n{cached}")
    else:
        print("nobody answered within half a second", file=sys.stderr)
    return 0 if reports else 1


async def _collect(nats_url: str) -> list[LoadReported]:
    async with on_bus(nats_url, name="shoal-status") as bus:
        return await collect_loads(bus, wait_s=WAIT_S)


def _table(reports: list[LoadReported]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("actor", "host", "pid", "state", "running", "waiting", "tokens", "more"):
        is_number = header in ("pid", "running", "waiting", "tokens")
        table.add_column(header, justify="right" if is_number else "left", no_wrap=header == "actor")
    for report in reports:
        table.add_row(
            f"{report.role}/{report.id}",
            report.host,
            str(report.pid),
            "accepting" if report.is_accepting else "draining",
            _of(report.num_running, report.capacity_requests),
            str(report.num_waiting),
            _of(report.num_tokens, report.capacity_tokens),
            " ".join(f"{key}={amount}" for key, amount in _said(report.detail)),
        )
    return table


def _said(detail: Mapping[str, float]) -> list[tuple[str, str]]:
    """What an actor says of itself besides, for people: times in seconds, and what work costs in one word."""
    shown = []
    for key, value in detail.items():
        name, _, tenant = key.partition(":")
        if name == "cost_token_ns":
            shown.append(("token_us", f"{value / 1e3:.3g}"))
        elif name == "cost_residual":
            shown.append(("cost_off", f"{value:.1%}"))
        elif name.startswith("cost_"):
            continue  # `--json` has them all
        elif name.endswith("_ns"):
            shown.append((f"{name.removesuffix('_ns')}_s" + (f":{tenant}" if tenant else ""), f"{value / 1e9:.3g}"))
        else:
            shown.append((key, _amount(key, value)))
    return shown


def _of(used: int, capacity: int) -> str:
    return f"{used}/{capacity}" if capacity else str(used)


def _cached(reports: list[LoadReported]) -> str:
    """How much of their prompts did not have to be computed, since the entrypoints that run were started."""
    details = [report.detail for report in reports if report.role is Role.ENTRYPOINT]
    num_prompt = sum(detail.get("prompt_tokens", 0) for detail in details)
    num_cached = sum(detail.get("cached_tokens", 0) for detail in details)
    return f"{100 * num_cached / num_prompt:.0f} % of {num_prompt:,.0f} prompt tokens were cached" if num_prompt else ""


def _amount(key: str, value: float) -> str:
    """Of bytes in a unit that leaves few digits; one word, in any case."""
    if not f"_{key}".endswith("_bytes"):
        return f"{value:,.0f}" if float(value).is_integer() or value >= 1000 else f"{value:.3g}"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((int(max(value, 1)).bit_length() - 1) // 10, len(units) - 1)
    return f"{value / 1024**power:.4g}{units[power]}"
