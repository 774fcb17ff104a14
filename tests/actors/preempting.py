"""Requests that make way when a test wants it, room or no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.decode import pressure
from actors.decode.pressure import Relief
from actors.decode.slots import Generation


def preempt_at(monkeypatch: pytest.MonkeyPatch, ids: Sequence[str], num_output: int) -> None:
    """Each of these makes way once, when it has so much output."""
    left = set(ids)

    def relieve(here: Sequence[Generation], num_free: int, max_tokens: int) -> Relief:
        relief = pressure.relieve(here, num_free, max_tokens)
        gone = [one for one in here if one.id in left and one.num_output >= num_output and one.end is None]
        left.difference_update(one.id for one in gone)
        grown = [pair for pair in relief.grown if pair[0] not in gone]
        return replace(relief, preempted=gone, grown=grown)

    monkeypatch.setattr("actors.decode.actor.relieve", relieve)
    monkeypatch.setattr("actors.decode.actor.may_want", lambda one, max_tokens: True)
