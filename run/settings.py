"""What the environment says: the SHOAL_* variables, read and checked in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from actors.rules.tenants import Tenants, TenantsError
from bus.actor import GRACE_S

Drafts = Literal["off", "fixed", "scheduled"]

DEFAULT_HTTP_PORT = 8000
DEFAULT_MODEL = Path(__file__).parent / "models" / "shoal-tiny"
LOOPBACK = "127.0.0.1"
DEFAULT_STORE_MB = 1024
SNAPSHOT_SHARE = 64
"""Of the machine's memory, for each replica that keeps windows: a machine of a cluster has one, a laptop two."""
MB = 1 << 20
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT_STEP_TIMEOUT_S = 15.0
LONGEST_GRACE_S = 3600.0
SMALLEST_SLAB_BYTES = 4 * MB
LARGEST_SLAB_BYTES = 4096 * MB
NUM_SLABS = 64
"""So many files the budget makes, where that leaves them within their limits: reclaim and repair go file by file."""


class SettingsError(ValueError):
    """A variable that cannot be used. Names it, says what is wrong and what to do."""


@dataclass(frozen=True)
class Settings:
    """SHOAL_HTTP_PORT (0: any free one), SHOAL_HOST, SHOAL_API_KEYS, SHOAL_TENANTS, SHOAL_NATS_URL, SHOAL_HOME,
    SHOAL_MODEL, SHOAL_STORE, SHOAL_STORE_MB, SHOAL_SNAPSHOT_MB, SHOAL_STEP_TIMEOUT_S, SHOAL_GRACE_S, SHOAL_DRAFTS,
    SHOAL_LOG_LEVEL (of nodes).

    `host` is where this process listens; without keys that is loopback unless SHOAL_HOST says otherwise, as it must
    inside a container. `nats_url` is empty when there is no broker yet. `model` is an existing folder.
    `store` is the folder of cached blocks, which need not exist, and `store_bytes` what its files may take;
    `snapshot_bytes` is the memory that the kept windows of one prefill or decode replica may take. `step_timeout_s` is
    for how long a rank of an expert-parallel group waits for another in a step, before it takes it for gone. `drafts`
    is what engines do with the checkpoint's draft stages; the same everywhere, as states with and without differ.
    `grace_s`: for how long requests go on in a process that leaves, before others are to go on with them.
    """

    http_port: int
    host: str
    api_keys: str
    nats_url: str
    home: Path
    model: Path
    store: Path
    store_bytes: int
    snapshot_bytes: int
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S
    tenants_path: Path | None = None
    drafts: Drafts = "scheduled"
    grace_s: float = GRACE_S
    log_level: str = "WARNING"

    def tenants(self) -> Tenants:
        """What the tenants file says now; no tenants without one. Raises SettingsError."""
        try:
            return Tenants.from_file(self.tenants_path) if self.tenants_path else Tenants()
        except TenantsError as error:
            raise SettingsError(f"SHOAL_TENANTS: {error}") from None

    @property
    def slab_bytes(self) -> int:
        """Of one file of the store."""
        return min(max(self.store_bytes // NUM_SLABS, SMALLEST_SLAB_BYTES), LARGEST_SLAB_BYTES)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables. Raises SettingsError."""
        home = Path(environment.get("SHOAL_HOME", "") or ".shoal").absolute()
        return cls(
            http_port=_port(environment.get("SHOAL_HTTP_PORT", "")),
            host=environment.get("SHOAL_HOST", "") or LOOPBACK,
            api_keys=environment.get("SHOAL_API_KEYS", ""),
            nats_url=environment.get("SHOAL_NATS_URL", ""),
            home=home,
            model=_model(environment.get("SHOAL_MODEL", "")),
            store=Path(environment.get("SHOAL_STORE", "") or home / "store").absolute(),
            store_bytes=_store_bytes(environment.get("SHOAL_STORE_MB", "")),
            snapshot_bytes=_snapshot_bytes(environment.get("SHOAL_SNAPSHOT_MB", "")),
            step_timeout_s=_step_timeout_s(environment.get("SHOAL_STEP_TIMEOUT_S", "")),
            tenants_path=Path(tenants).absolute() if (tenants := environment.get("SHOAL_TENANTS", "")) else None,
            drafts=_drafts(environment.get("SHOAL_DRAFTS", "")),
            grace_s=grace_s("SHOAL_GRACE_S", environment.get("SHOAL_GRACE_S", "")),
            log_level=_log_level(environment.get("SHOAL_LOG_LEVEL", "")),
        )


def _port(text: str) -> int:
    if not text:
        return DEFAULT_HTTP_PORT
    if not text.isdecimal() or int(text) > 65535:
        raise SettingsError(f"SHOAL_HTTP_PORT={text}: not a port; set a number up to 65535, or 0 for any free port")
    return int(text)


def _store_bytes(text: str) -> int:
    if not text:
        return DEFAULT_STORE_MB * MB
    smallest = SMALLEST_SLAB_BYTES // MB
    if not (text.isascii() and text.isdecimal() and len(text) <= 12) or int(text) < smallest:
        raise SettingsError(
            f"SHOAL_STORE_MB={text}: not a budget; set a number of MiB, {smallest} or more. To store nothing, take "
            "metadata, kvstore and writer out of the cluster file"
        )
    return int(text) * MB


def _snapshot_bytes(text: str) -> int:
    if not text:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SNAPSHOT_SHARE
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise SettingsError(f"SHOAL_SNAPSHOT_MB={text}: not a size; set a number of MiB, 0 to keep no windows")
    return int(text) * MB


def _step_timeout_s(text: str) -> float:
    if not text:
        return DEFAULT_STEP_TIMEOUT_S
    if not (text.isascii() and text.isdecimal() and len(text) <= 6) or int(text) < 1:
        raise SettingsError(f"SHOAL_STEP_TIMEOUT_S={text}: not a time; set whole seconds, 1 or more")
    return float(text)


def _log_level(text: str) -> str:
    if (level := text.upper() or "WARNING") not in LOG_LEVELS:
        raise SettingsError(f"SHOAL_LOG_LEVEL={text}: not a level; set one of {', '.join(LOG_LEVELS)}")
    return level


def grace_s(name: str, text: str) -> float:
    """The setting of this name. Raises SettingsError."""
    try:
        found = float(text or GRACE_S)
    except ValueError:
        found = -1.0
    if not 0 <= found <= LONGEST_GRACE_S:
        raise SettingsError(f"{name}={text}: not a time; set seconds, from 0 to {LONGEST_GRACE_S:g}")
    return found


def _drafts(text: str) -> Drafts:
    for known in get_args(Drafts):
        if known == (text or "scheduled"):
            return cast(Drafts, known)
    raise SettingsError(f"SHOAL_DRAFTS={text}: not a mode; set {', '.join(get_args(Drafts))}")


def _model(text: str) -> Path:
    if not text:
        return DEFAULT_MODEL
    if not Path(text).is_dir():
        looks_like_a_name = text.count("/") == 1 and not text.startswith((".", "~", "/"))
        name = text if looks_like_a_name else "ORGANISATION/MODEL"
        raise SettingsError(
            f"SHOAL_MODEL={text}: there is no such folder. Shoal loads checkpoints from disk and fetches nothing: "
            f"download one, for example with `hf download {name} --local-dir ./model`, then set SHOAL_MODEL=./model"
        )
    return Path(text).absolute()
