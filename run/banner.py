"""What `shoal up` says once everything answers: addresses, and commands that work where they are read."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

from run.settings import LOOPBACK, MB, Settings


def banner(settings: Settings, models: list[str], nats: str, *, has_keys: bool, stores_blocks: bool) -> list[str]:
    """Lines of plain text. `nats` is an address without a password; of keys nothing is shown but that they are asked
    for."""
    http = f"http://{LOOPBACK}:{settings.http_port}"
    lines = [
        f"  OpenAI SDK     base_url={http}/v1",
        f"  Anthropic SDK  base_url={http}",
        f"  NATS           {nats}  (subjects shoal.api.>)",
    ]
    if has_keys:
        lines.insert(2, f"  API keys       asked for; port {settings.http_port} is open on all interfaces")
    if stores_blocks:
        lines.append(f"  KV cache       {settings.store}, at most {settings.store_bytes // MB:,} MiB")
    lines.append(f"  logs           {settings.home}/logs")
    body = json.dumps({"model": models[0] if models else "", "messages": [{"role": "user", "content": "Hello"}]})
    headers = "-H 'content-type: application/json'" + (' -H "authorization: Bearer $KEY"' if has_keys else "")
    shoal = _shoal(settings)
    return [
        *lines,
        "",
        "Try it, with one of your keys in KEY:" if has_keys else "Try it:",
        f"  {shoal} chat" + (' --key "$KEY"' if has_keys else ""),
        f"  {shoal} status",
        f"  curl {http}/v1/chat/completions {headers} -d {shlex.quote(body)}",
        "",
        "Ctrl-C stops everything.",
    ]


def _shoal(settings: Settings) -> str:
    """The command of this installation, for the stack of these settings, from the current folder."""
    ours, on_path = Path(sys.executable).with_name("shoal"), shutil.which("shoal")
    if not ours.exists():
        command = f"{_near(Path(sys.executable))} -m run.cli"
    else:
        command = "shoal" if on_path and ours.samefile(on_path) else _near(ours)
    is_default = settings.home == Settings.from_environment({}).home
    return command if is_default else f"SHOAL_HOME={_near(settings.home)} {command}"


def _near(path: Path) -> str:
    """For a shell in the current folder."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
