"""What is wrong before anything starts is one line that names it."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kernels.shards import read_shards
from run.cluster import Member, ProcessSpec
from run.home import Home, Running
from run.settings import Settings, SettingsError
from run.store import Store, need_folder
from run.up import up
from schemas.message import Role


def start(settings: Settings, ready_file: Path | None = None) -> None:
    up((), settings, Console(quiet=True), ready_file)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(Settings.from_environment({}), home=tmp_path / "home", http_port=0)


def test_a_home_that_cannot_be_made(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"SHOAL_HOME=.*file"):
        start(replace(settings, home=tmp_path / "file"))


def test_a_model_folder_without_a_model(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL: .*config\.json"):
        start(replace(settings, model=tmp_path))


def test_a_model_whose_file_is_cut_short(settings: Settings, tmp_path: Path) -> None:
    shutil.copytree(settings.model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL: .*model\.safetensors: truncated: 1,000 bytes are missing"):
        start(replace(settings, model=tmp_path / "model"))
    assert not settings.home.exists(), "nothing was started"


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 7 + b"\x7f{}", b"\3\0\0\0\0\0\0\0{a}"])
def test_a_model_whose_file_is_none(settings: Settings, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(settings.model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL: .*model\.safetensors: not a safetensors file"):
        start(replace(settings, model=tmp_path / "model"))


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", header(b"{}"), r"model\.safetensors: no tensor is in it"),
        ("model.safetensors", header(DEEP), r"model\.safetensors: not a safetensors file: nested too deep"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', r"index\.json: no tensor is in it"),
        ("model.safetensors.index.json", DEEP, r"index\.json: no weight_map of names to files: nested too deep"),
        ("config.json", DEEP, r"config\.json: not JSON: nested too deep"),
        ("config.json", b'{"text_config": 3}', r"config\.json: text_config is not an object"),
        ("shoal.json", DEEP, r"shoal\.json: not JSON: nested too deep"),
        ("shoal.json", b'{"context_tokens": "many"}', r"shoal\.json: context_tokens is missing or not a number"),
        ("shoal.json", b'{"aliases": 3}', r"shoal\.json: aliases must be a list"),
    ],
)
def test_a_model_with_a_file_of_garbage(
    settings: Settings, tmp_path: Path, file: str, content: bytes, said: str
) -> None:
    shutil.copytree(settings.model, tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content)
    with pytest.raises(SettingsError, match=f"SHOAL_MODEL: .*{said}"):
        start(replace(settings, model=tmp_path / "model"))


def test_a_model_of_which_only_the_index_is_there(settings: Settings, tmp_path: Path) -> None:
    shutil.copytree(settings.model, tmp_path / "model")
    names = read_shards(settings.model).files
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL: .*index\.json: none of its files is there"):
        start(replace(settings, model=tmp_path / "model"))


STORING = (ProcessSpec("front", (Member(Role.WRITER, "w0"),), num_threads=1),)


def test_a_store_that_cannot_be_made(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = replace(settings, store=tmp_path / "file" / "store")
    with pytest.raises(SettingsError, match=r"SHOAL_STORE=.*store: Not a directory; set it to a folder you can write"):
        up(STORING, settings, Console(quiet=True), None)
    with pytest.raises(SettingsError, match="SHOAL_STORE="):
        need_folder(tmp_path / "file")


def test_a_store_of_another_system_is_left_alone(settings: Settings, tmp_path: Path) -> None:
    other = Store(tmp_path / "store")
    other.acquire()
    settings = replace(settings, store=other.folder)
    with pytest.raises(SettingsError, match="SHOAL_STORE=.*another `shoal up` stores its blocks here"):
        up(STORING, settings, Console(quiet=True), None)
    other.release()
    again = Store(tmp_path / "store")
    again.acquire()
    again.release()


def test_a_store_that_was_deleted_under_a_system_is_still_its_own(tmp_path: Path) -> None:
    running, second = Store(tmp_path / "store"), Store(tmp_path / "store")
    running.acquire()
    shutil.rmtree(running.folder)
    with pytest.raises(SettingsError, match="another `shoal up` stores its blocks here"):
        second.acquire()
    running.release()
    second.acquire()
    second.release()


def test_a_store_with_no_place_beside_it_is_locked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_within(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os_open(path, flags, mode)

    os_open = os.open
    monkeypatch.setattr(os, "open", open_within)
    running = Store(tmp_path / "store")
    running.acquire()
    with pytest.raises(SettingsError, match="another `shoal up` stores its blocks here"):
        Store(tmp_path / "store").acquire()
    running.release()


def test_keys_that_are_none(settings: Settings) -> None:
    with pytest.raises(SettingsError, match="SHOAL_API_KEYS: entry 1"):
        start(replace(settings, api_keys=",,="))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants.a]\nkey = 3", r"SHOAL_TENANTS: .*t\.toml: tenants\.a: unknown key 'key'"),
        ('[tenants.a]\nkeys = ["SECRET"', r"SHOAL_TENANTS: .*t\.toml: not TOML \("),
        ("[tenants.a]\ntokens_per_minute = 3", r"SHOAL_TENANTS: .*tenants\.a has limits, but .* add quota/q0"),
        ('[tenants.a]\nkeys = ["SECRET"]', r"SHOAL_API_KEYS: entry 2: this key of tenant public is also a's"),
    ],
)
def test_tenants_that_are_none(settings: Settings, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(SettingsError, match=said) as caught:
        start(replace(settings, tenants_path=tmp_path / "t.toml", api_keys="x,SECRET"))
    assert "SECRET" not in str(caught.value) and "\n" not in str(caught.value)
    assert not settings.home.exists(), "nothing was started"


def test_a_tenants_file_that_is_not_there(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"SHOAL_TENANTS: .*no\.toml: No such file"):
        start(replace(settings, tenants_path=tmp_path / "no.toml"))


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_tenants_file_that_others_can_read(settings: Settings, tmp_path: Path, mode: int, is_warned: bool) -> None:
    path, console = tmp_path / "t.toml", Console(record=True, file=io.StringIO(), width=200)
    path.write_text('[tenants.a]\nkeys = ["SECRET"]')
    path.chmod(mode)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="SHOAL_HOME"):  # it gets that far
        up((), replace(settings, tenants_path=path, home=tmp_path / "file"), console, None)
    said = console.export_text()
    assert ("chmod 600" in said) is is_warned and "SECRET" not in said


@pytest.mark.parametrize("name", [".", "missing/ready.json"])
def test_a_ready_file_that_cannot_be_written(settings: Settings, tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="--ready-file"):
        start(settings, tmp_path / name)
    assert not settings.home.exists(), "nothing was started"


def test_a_ready_file_of_a_killed_system_is_not_believed(settings: Settings, tmp_path: Path) -> None:
    """Also where nothing is started; but the one of a system that runs stays."""
    ready_file = tmp_path / "ready.json"
    ready_file.write_text("{}")
    refused = replace(settings, api_keys=",,=")
    running = Home(settings.home)
    running.acquire()
    running.write(Running(pid=1, http="", nats_url=""))
    with pytest.raises(SettingsError):
        start(refused, ready_file)
    assert ready_file.exists()
    running.release()
    with pytest.raises(SettingsError):
        start(refused, ready_file)
    assert not ready_file.exists()
