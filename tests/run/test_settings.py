"""The SHOAL_* variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from run.settings import Settings, SettingsError


def test_defaults() -> None:
    settings = Settings.from_environment({})
    assert (settings.http_port, settings.host, settings.nats_url) == (8000, "127.0.0.1", "")
    assert settings.home == Path(".shoal").absolute()
    assert settings.model.name == "shoal-tiny"


def test_what_is_set_counts(tmp_path: Path) -> None:
    settings = Settings.from_environment({"SHOAL_HTTP_PORT": "0", "SHOAL_MODEL": str(tmp_path), "SHOAL_HOME": "x"})
    assert (settings.http_port, settings.model, settings.home) == (0, tmp_path, Path("x").absolute())


@pytest.mark.parametrize("port", ["http", "-1", "65536", "8000.0"])
def test_a_bad_port_names_the_variable(port: str) -> None:
    with pytest.raises(SettingsError, match=f"SHOAL_HTTP_PORT={port}: not a port"):
        Settings.from_environment({"SHOAL_HTTP_PORT": port})


def test_a_hub_name_is_answered_with_how_to_get_a_folder() -> None:
    with pytest.raises(SettingsError, match=r"hf download deepseek-ai/DeepSeek-V4.1-Flash --local-dir"):
        Settings.from_environment({"SHOAL_MODEL": "deepseek-ai/DeepSeek-V4.1-Flash"})
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL=/no/such: there is no such folder.*ORGANISATION/MODEL"):
        Settings.from_environment({"SHOAL_MODEL": "/no/such"})
