"""`shoal train` tells the user what is wrong in one line, before any process is started or as soon as it looks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from run.settings import SettingsError
from run.train import command
from run.train.state import RunFolder


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # what is refused here needs none


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"processes": 0}, "there can be 1 or 2"),
        ({"processes": 3}, "there can be 1 or 2"),
        ({"minutes": 0}, "--minutes 0: must be positive"),
        ({"minutes": float("nan")}, "--minutes nan: must be positive"),
    ],
)
def test_what_cannot_be_is_a_mistake_of_usage(tmp_path: Path, arguments: dict[str, float], said: str) -> None:
    for train in (command.train, command.drafts):
        with pytest.raises(SettingsError, match=said):
            train(tmp_path / "run", **arguments)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="--num 0"):
        command.drafts(tmp_path / "run", num=0)
    assert not any(tmp_path.iterdir())


def test_there_must_be_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(SettingsError, match="there is no no-compiler"):
        command.train(tmp_path / "run")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.train(tmp_path / "file") == 1
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "log.jsonl").mkdir()
    assert command.train(tmp_path) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"shoal: {tmp_path}/file/model: Not a directory",
        f"shoal: {tmp_path}/log.jsonl: Is a directory",
    ]


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.load() is None
    (tmp_path / "state.pt").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"state\.pt: not a state of a run"):
        folder.load()


def test_only_one_command_trains_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    one, drafts = RunFolder(tmp_path), RunFolder(tmp_path, "drafts.pt", "drafts.jsonl")
    one.acquire()
    with pytest.raises(SettingsError, match="another `shoal train` is at work there"):
        drafts.acquire()
    one.release()
    drafts.acquire()
    drafts.release()
