"""`shoal bench kv`: what storing and finding cached blocks costs, beside what the disk and the hash alone take."""

from __future__ import annotations

import asyncio
import json as json_module
import shutil
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from run.bench.kv_disk import NUM_SLABS, SLAB_BYTES, measure_disk
from run.bench.kv_index import measure_index
from run.bench.kv_trace import measure_trace
from run.settings import Settings, SettingsError
from run.store import need_folder

BLOCK_BYTES = 113_920
"""Of the real model: 128 tokens of 890 bytes."""

KEYS = (
    *("put_ratio", "get_ratio", "disk_bytes_per_token", "layout_bytes_per_token", "lookup_ms_8192_blocks"),
    *("hash_ms_1m_tokens", "raw_hash_ms_1m_tokens", "metadata_bytes_per_block", "restart_blocks_per_s"),
)
"""What `--json` begins with; the rest is detail."""

TRACE = Path("../shared/traces/mooncake/conversation_trace.jsonl")


def bench_kv(
    *, json: bool = False, folder: Path | None = None, block_bytes: int = BLOCK_BYTES, trace: Path = TRACE
) -> None:
    """Measure and print: put and get beside the raw disk, look-ups, names, a restart, and hits on a trace.

    Parameters
    ----------
    json
        Print one JSON object instead of tables.
    folder
        On the disk to be measured; the store's (SHOAL_STORE) by default. What is written there is removed.
    block_bytes
        Of a block's payload; the real model's by default.
    trace
        A trace of requests in Mooncake's format, such as its conversation_trace.jsonl; left out where there is none.
    """
    place = folder or Settings.from_environment().store
    need_folder(place, "--folder" if folder else "SHOAL_STORE")
    needed = 3 * NUM_SLABS * SLAB_BYTES
    if shutil.disk_usage(place).free < needed:
        raise SettingsError(f"{place}: the benchmark needs {needed >> 20} MiB there; give it another --folder")
    if block_bytes < 1:
        raise SettingsError(f"--block-bytes {block_bytes}: a block has a byte at least")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        found = uvloop.run(_measure(progress, place, block_bytes, trace if trace.is_file() else None))
    if json:
        print(json_module.dumps({**{key: found[key] for key in KEYS}, **found}))
    else:
        _print(found)


async def _measure(progress: Progress, place: Path, block_bytes: int, trace: Path | None) -> dict[str, Any]:
    parts = [progress.add_task(name, total=1.0) for name in ("disk", "names and look-ups", "trace")]
    disk, index, hits = [lambda done, part=part: progress.update(part, completed=done) for part in parts]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=place) as folder:
        found = await measure_disk(Path(folder), block_bytes, disk)
    found.update(await measure_index(index))
    if trace is not None:
        found.update(await asyncio.to_thread(measure_trace, trace, hits))
    return found


def _print(found: dict[str, Any]) -> None:
    console = Console()
    title = f"{found['num_blocks']:,} blocks of {found['block_bytes']:,} bytes"
    table = Table("", "GB/s", "plain GB/s", "ratio", "one block: median ms", "99 % ms", title=title)
    for name, where in (("put", "put, to the disk"), ("get", "get, from the disk"), ("get_cached", "get, from memory")):
        ours, plain = found[f"{name}_gb_s"], found[f"raw_{name}_gb_s"]
        latencies = (f"{found[key]:.2f}" if (key := f"{name}_ms_p{part}") in found else "" for part in (50, 99))
        table.add_row(where, f"{ours:.2f}", f"{plain:.2f}", f"{found[f'{name}_ratio']:.2f}", *latencies)
    console.print(table)
    layout, disk = found["layout_bytes_per_token"], found["disk_bytes_per_token"]
    raw = found["raw_hash_ms_1m_tokens"]
    table = Table("", "", "beside", title="names, look-ups, space")
    table.add_row("bytes on disk, per token", f"{disk:,.2f}", f"{layout:,.2f} of the layout: {disk / layout - 1:+.2%}")
    table.add_row("names of 1 M tokens", f"{found['hash_ms_1m_tokens']:.1f} ms", f"{raw:.1f} ms for the hashes alone")
    table.add_row(
        "where their 8,192 blocks are",
        f"{found['lookup_ms_8192_blocks']:.1f} ms",
        f"{found['table_ms_8192_blocks']:.1f} ms in one table",
    )
    table.add_row("metadata of a block", f"{found['metadata_bytes_per_block']:.0f} bytes", "")
    table.add_row("a writer's start", f"{found['restart_blocks_per_s']:,} blocks/s", "")
    console.print(table)
    if "hit_ratio" not in found:
        console.print("no trace, so no hit ratio: give one with --trace; run/README.md says where there is one")
        return
    title = f"hits of {found['trace_requests']:,} requests, {found['trace_blocks']:,} blocks"
    table = Table("room for", "of all blocks", title=title)
    table.add_row("all", f"{found['hit_ratio']:.1%}")
    table.add_row("all, by the trace's own blocks", f"{found['hit_ratio_optimum']:.1%}")
    for part, ratio in found["hit_ratio_bounded"].items():
        table.add_row(f"{float(part):.0%}, {found['bounded_requests']:,} requests", f"{ratio:.1%}")
    console.print(table)
