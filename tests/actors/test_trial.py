"""Grammars are tried in a process beside the recipe: none takes longer than it may, or anyone else with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import replace

import pytest

from actors.recipe import trial
from actors.recipe.fields import Refusal
from actors.recipe.grammar import Asked, write
from schemas.failure import Code
from tests.actors.constrained import grammars


def fresh(monkeypatch: pytest.MonkeyPatch) -> trial.Trials:
    """All grammars are tried here, by a process that is to be started."""
    trials = trial.Trials()
    monkeypatch.setattr(trial, "_few", trials)
    monkeypatch.setattr(trial, "_many", trials)
    return trials


def test_patterns_that_meet_are_tried_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [{"type": "string", "pattern": f"^a{{{n}}}b"} for n in range(1, 6)]
    meeting = {"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(1, 40)]}
    monkeypatch.setattr(trial, "TRIAL_S", 0.2)
    with contextlib.closing(fresh(monkeypatch)) as trials:
        with pytest.raises(Refusal, match="cannot be understood in time") as refused:
            grammars().find(Asked(json=json.dumps(meeting)))
        assert refused.value.failure.code is Code.UNSUPPORTED
        with monkeypatch.context() as busy, trials._turn, pytest.raises(Refusal, match="retry later") as refused:
            busy.setattr(trial, "WAIT_S", 0.001)
            grammars().find(Asked(json=json.dumps({"anyOf": patterns})))
        assert refused.value.failure.code is Code.OVERLOADED
        with monkeypatch.context() as slow, pytest.raises(Refusal, match="not be tried here in time"):
            slow.setattr(trial, "PATIENCE_S", 0.0)
            trials.ask(grammar := write(Asked(json='{"const": "late"}'), trial.MARKS), 1.0)
        assert trials.ask(grammar, 1.0) == ""  # that was not remembered
        assert grammars().find(Asked(json=json.dumps({"anyOf": patterns}))).text  # nor that


def test_a_grammar_that_crashes_what_tries_it_is_refused_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import os, sys; os.read(int(sys.argv[3]), 1); os.abort()"
    popen = subprocess.Popen
    with contextlib.closing(fresh(monkeypatch)) as trials:
        with monkeypatch.context() as broken:
            broken.setattr(subprocess, "Popen", lambda args, **how: popen([args[0], "-c", crash, *args[1:]], **how))
            asked = Asked(json='{"const": "crash"}')
            with pytest.raises(Refusal, match="cannot be enforced: Too complex") as refused:
                grammars().find(asked)
            assert refused.value.failure.code is Code.UNSUPPORTED
        with pytest.raises(Refusal):
            grammars().find(replace(asked, thinks=True))  # the same text is tried for it
        assert trials._process is None
        assert grammars().find(Asked(json='{"const": "sound"}')).text


def test_what_tries_grammars_ends_with_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(fresh(monkeypatch)) as trials:
        said = trials.ask("none", 1.0)
        process = trials._process
        assert process is not None and process.poll() is None
        trials._connection.close()  # as the system does for one that is gone
        assert process.wait(30) == 0
        assert trials.ask("none", 1.0) == said  # by another, if it was the only one to be gone
