"""What would fail later, in some process of `shoal up`, fails before anything is started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from actors.gateway.keys import Keys, KeysError
from actors.recipe.card import CardError, ModelCard
from kernels.audit import audit, refuse
from kernels.config import ConfigError, ModelConfig
from kernels.shards import CheckpointError, read_shards
from run.cluster import ProcessSpec, check_experts
from run.home import Home
from run.settings import LOOPBACK, Settings, SettingsError
from schemas.message import Role


def clear(ready_file: Path, home: Home) -> None:
    """Remove the file of a run that was killed: it would be believed. Raises SettingsError if none can be written."""
    if ready_file.is_dir() or not os.access(ready_file.absolute().parent, os.W_OK):
        raise SettingsError(f"--ready-file {ready_file}: give a file in a folder that exists and that you can write")
    if home.read() is None:  # else it may be of the one that runs
        ready_file.unlink(missing_ok=True)


def check(settings: Settings, specs: tuple[ProcessSpec, ...]) -> None:
    """What would fail later, in some process, fails here and now. Raises SettingsError."""
    try:
        ModelCard.from_folder(settings.model)
        shards = read_shards(settings.model)
        config = ModelConfig.from_folder(settings.model)
        check_experts(specs, config)
        refuse(audit(config, shards))
        shards.need_files()
        Keys.parse(settings.api_keys, settings.tenants())
    except (CardError, ConfigError, CheckpointError) as error:
        raise SettingsError(f"SHOAL_MODEL: {error}") from None
    except KeysError as error:
        raise SettingsError(str(error)) from None


def check_tenants(settings: Settings, specs: tuple[ProcessSpec, ...], console: Console) -> None:
    """Limits need someone who keeps them, secrets a file of their own. Raises SettingsError."""
    path = settings.tenants_path
    limited = [tenant.name for tenant in settings.tenants() if tenant.is_limited]
    if limited and all(member.role is not Role.QUOTA for spec in specs for member in spec.members):
        where = f"SHOAL_TENANTS: {path}: tenants.{limited[0]}"
        raise SettingsError(f"{where} has limits, but no process of the cluster file has a quota actor; add quota/q0")
    if path is not None and path.stat().st_mode & 0o077:
        console.print(f"[yellow]SHOAL_TENANTS: others may read {escape(str(path))}; chmod 600 it[/]", soft_wrap=True)


def claim_port(port: int) -> int:
    """The port itself, or a free one for 0. Raises SettingsError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise SettingsError(
                f"SHOAL_HTTP_PORT={port}: {error.strerror}; set it to another port, or to 0 for any free one"
            ) from None
        return int(probe.getsockname()[1])
