"""What the environment says: the SHOAL_* variables, read and checked in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HTTP_PORT = 8000
DEFAULT_MODEL = Path(__file__).parent / "models" / "shoal-tiny"
LOOPBACK = "127.0.0.1"


class SettingsError(ValueError):
    """A variable that cannot be used. Names it, says what is wrong and what to do."""


@dataclass(frozen=True)
class Settings:
    """SHOAL_HTTP_PORT (0: any free one), SHOAL_HOST, SHOAL_API_KEYS, SHOAL_NATS_URL, SHOAL_HOME, SHOAL_MODEL.

    `host` is where this process listens; without keys that is loopback unless SHOAL_HOST says otherwise, as it must
    inside a container. `nats_url` is empty when there is no broker yet. `model` is an existing folder.
    """

    http_port: int
    host: str
    api_keys: str
    nats_url: str
    home: Path
    model: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables. Raises SettingsError."""
        return cls(
            http_port=_port(environment.get("SHOAL_HTTP_PORT", "")),
            host=environment.get("SHOAL_HOST", "") or LOOPBACK,
            api_keys=environment.get("SHOAL_API_KEYS", ""),
            nats_url=environment.get("SHOAL_NATS_URL", ""),
            home=Path(environment.get("SHOAL_HOME", "") or ".shoal").absolute(),
            model=_model(environment.get("SHOAL_MODEL", "")),
        )


def _port(text: str) -> int:
    if not text:
        return DEFAULT_HTTP_PORT
    if not text.isdecimal() or int(text) > 65535:
        raise SettingsError(f"SHOAL_HTTP_PORT={text}: not a port; set a number up to 65535, or 0 for any free port")
    return int(text)


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
