"""The fault simulator: one script one history, the least script of what breaks, and that it does find what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from run.settings import SettingsError
from run.simulate.chaos import command
from run.simulate.chaos.chance import script
from run.simulate.chaos.command import chaos
from run.simulate.chaos.history import run
from run.simulate.chaos.script import Script, read, text
from run.simulate.chaos.shrink import least, shrink
from tests.run.planted import PLANTS, Plant, path_of

FOUND = sorted(Path("tests/data/chaos").glob("*.json"))
"""Scripts that broke something once, made small."""


def test_one_script_gives_one_history() -> None:
    first, again, other = (run(script(seed)) for seed in (1, 1, 2))
    assert first == again and first.digest != other.digest
    assert first.num_events > 300 and first.ends.total() == len(script(1).asks)


def test_an_interrupt_ends_it_and_its_processes_at_once() -> None:
    command = [sys.executable, "-m", "run.cli", "simulate", "--chaos", "--seeds", "100000", "--processes", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while len(children.read_text().split()) < 3:  # two, and what watches over shared memory
                time.sleep(0.05)
            time.sleep(1.0)  # they have seeds by now
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(20) == 130
            with pytest.raises(ProcessLookupError):
                for _ in range(100):
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_scripts_come_and_go_as_text(tmp_path: Path) -> None:
    for seed in range(20):
        (tmp_path / "script.json").write_text(text(script(seed)))
        assert read(tmp_path / "script.json") == script(seed)


@pytest.mark.parametrize("first", range(0, 20, 5))
def test_some_seeds_break_nothing(first: int) -> None:
    assert [run(script(seed)).violation for seed in range(first, first + 5)] == [None] * 5


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_is_mended(path: Path) -> None:
    assert run(read(path)).violation is None


@pytest.mark.parametrize(("name", "plant"), PLANTS.items(), ids=PLANTS)
def test_planted_bugs_are_found(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a script, made small, that is one of the first thousand seeds: `python -m tests.run.planted`."""
    small = read(path_of(name))
    assert run(small).violation is None
    plant(monkeypatch)
    assert run(small).violation is not None


class TestLeast:
    @pytest.mark.parametrize("needed", [[], [3], [0, 7], [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 6]])
    def test_all_that_is_needed_and_nothing_else(self, needed: list[int]) -> None:
        tried = []

        def fails(some: list[int]) -> bool:
            tried.append(some)
            return set(needed) <= set(some)

        assert least(range(8), fails) == needed
        assert all(some == sorted(some) for some in tried)

    def test_a_script_loses_what_it_does_not_need(self) -> None:
        whole = next(script(seed) for seed in range(50) if len(script(seed).faults) > 4)
        needed = whole.faults[2], whole.asks[1]

        def fails(some: Script) -> bool:
            return needed[0] in some.faults and needed[1] in some.asks

        small = shrink(whole, fails)
        assert (small.faults, small.asks) == ([needed[0]], [needed[1]])
        assert structs.replace(small, faults=whole.faults, asks=whole.asks) == whole


class TestCommand:
    def test_one_seed_and_its_script_are_the_same(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "script.json").write_text(text(script(3)))
        assert chaos(seed=3, json=True) == chaos(script=tmp_path / "script.json", json=True) == 0
        said = capsys.readouterr()
        first, second = map(json.loads, said.out.splitlines())
        assert first.keys() == {"seeds", "events", "violations", "wall_s", "broken"}
        assert (first["seeds"], first["violations"], first["broken"]) == (1, 0, [])
        assert first["events"] == second["events"] == run(script(3)).num_events
        assert said.err.count(run(script(3)).digest) == 2

    def test_what_breaks_is_told_with_its_least_script(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        PLANTS["decode skips a release"](monkeypatch)
        seed = 0
        assert chaos(seed=seed, json=True) == 1
        told = json.loads(capsys.readouterr().out)
        (broken,) = told["broken"]
        assert (told["violations"], broken["seed"], broken["kind"]) == (1, seed, "reservations")
        (tmp_path / "least.json").write_text(broken["script"])
        small = read(tmp_path / "least.json")
        assert len(small.faults) + len(small.asks) < len(script(seed).faults) + len(script(seed).asks)
        assert chaos(script=tmp_path / "least.json") == 1

    def test_many_seeds_go_to_several_processes(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "TOLD_EVERY", 3)
        assert chaos(seeds=4, first=2, processes=2, json=True) == 0
        said = capsys.readouterr()
        assert said.err.strip() == "4 seeds, 0 broken"
        told = json.loads(said.out)
        assert (told["seeds"], told["violations"]) == (4, 0)
        assert told["events"] == sum(run(script(seed)).num_events for seed in range(2, 6))

    def test_a_history_that_is_another_one_is_a_violation(self) -> None:
        other = replace(run(script(2)), digest="other")
        (broken,) = command._again(2, other, can_shrink=False)
        assert broken.kind == "determinism"

    @pytest.mark.parametrize("arguments", [{"seeds": 0}, {"processes": -1}, {"script": Path("none.json")}])
    def test_what_cannot_be(self, arguments: dict[str, object]) -> None:
        with pytest.raises(SettingsError):
            chaos(**arguments)  # type: ignore[arg-type]
