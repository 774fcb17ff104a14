"""The SHOAL_* variables."""

from __future__ import annotations

import os
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


def test_tenants_are_those_of_the_file(tmp_path: Path) -> None:
    assert list(Settings.from_environment({}).tenants()) == []
    (tmp_path / "t.toml").write_text("[tenants.a]")
    settings = Settings.from_environment({"SHOAL_TENANTS": str(tmp_path / "t.toml")})
    assert [tenant.name for tenant in settings.tenants()] == ["a"]


@pytest.mark.parametrize("port", ["http", "-1", "65536", "8000.0"])
def test_a_bad_port_names_the_variable(port: str) -> None:
    with pytest.raises(SettingsError, match=f"SHOAL_HTTP_PORT={port}: not a port"):
        Settings.from_environment({"SHOAL_HTTP_PORT": port})


def test_a_hub_name_is_answered_with_how_to_get_a_folder() -> None:
    with pytest.raises(SettingsError, match=r"hf download deepseek-ai/DeepSeek-V4.1-Flash --local-dir"):
        Settings.from_environment({"SHOAL_MODEL": "deepseek-ai/DeepSeek-V4.1-Flash"})
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL=/no/such: there is no such folder.*ORGANISATION/MODEL"):
        Settings.from_environment({"SHOAL_MODEL": "/no/such"})


def test_the_store_is_in_the_home_and_its_files_are_parts_of_its_budget(tmp_path: Path) -> None:
    settings = Settings.from_environment({"SHOAL_HOME": "x"})
    assert (settings.store, settings.store_bytes) == (Path("x/store").absolute(), 1 << 30)
    assert settings.slab_bytes == 16 << 20
    settings = Settings.from_environment({"SHOAL_STORE": str(tmp_path), "SHOAL_STORE_MB": "4"})
    assert (settings.store, settings.store_bytes, settings.slab_bytes) == (tmp_path, 4 << 20, 4 << 20)
    assert Settings.from_environment({"SHOAL_STORE_MB": "1000000"}).slab_bytes == 4 << 30


def test_windows_take_a_share_of_the_memory_or_what_is_said() -> None:
    of_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < Settings.from_environment({}).snapshot_bytes < of_all / 50
    assert Settings.from_environment({"SHOAL_SNAPSHOT_MB": "3"}).snapshot_bytes == 3 << 20
    assert Settings.from_environment({"SHOAL_SNAPSHOT_MB": "0"}).snapshot_bytes == 0
    with pytest.raises(SettingsError, match="SHOAL_SNAPSHOT_MB=lots: not a size; set a number of MiB"):
        Settings.from_environment({"SHOAL_SNAPSHOT_MB": "lots"})


@pytest.mark.parametrize("budget", ["much", "-1", "0", "3", "1.5", "²", "9" * 5000])
def test_a_bad_budget_names_the_variable_and_what_to_do(budget: str) -> None:
    with pytest.raises(SettingsError, match=f"SHOAL_STORE_MB={budget}: not a budget; set .* 4 or more.*cluster file"):
        Settings.from_environment({"SHOAL_STORE_MB": budget})


def test_what_is_done_with_drafts() -> None:
    assert Settings.from_environment({}).drafts == "scheduled"
    assert Settings.from_environment({"SHOAL_DRAFTS": "off"}).drafts == "off"
    with pytest.raises(SettingsError, match="SHOAL_DRAFTS=5: not a mode; set off, fixed, scheduled"):
        Settings.from_environment({"SHOAL_DRAFTS": "5"})


def test_how_long_a_rank_waits_for_another() -> None:
    assert Settings.from_environment({}).step_timeout_s == 15.0
    assert Settings.from_environment({"SHOAL_STEP_TIMEOUT_S": "3"}).step_timeout_s == 3.0
    for text in ("0", "soon", "1.5", "-1"):
        with pytest.raises(SettingsError, match=f"SHOAL_STEP_TIMEOUT_S={text}: not a time; set whole seconds"):
            Settings.from_environment({"SHOAL_STEP_TIMEOUT_S": text})


def test_the_grace_is_a_time() -> None:
    assert Settings.from_environment({}).grace_s == 60.0
    assert Settings.from_environment({"SHOAL_GRACE_S": "0.5"}).grace_s == 0.5
    for text in ("-1", "3601", "nan", "soon"):
        with pytest.raises(SettingsError, match=f"SHOAL_GRACE_S={text}: not a time; set seconds, from 0 to 3600"):
            Settings.from_environment({"SHOAL_GRACE_S": text})


def test_a_level_of_the_log_is_one() -> None:
    assert Settings.from_environment({"SHOAL_LOG_LEVEL": "debug"}).log_level == "DEBUG"
    with pytest.raises(SettingsError, match="SHOAL_LOG_LEVEL=bogus: not a level; set one of DEBUG"):
        Settings.from_environment({"SHOAL_LOG_LEVEL": "bogus"})
