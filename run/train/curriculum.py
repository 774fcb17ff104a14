"""The plan of the bundled model: from short conversations to notes of 4,096 tokens, then ever smaller steps."""

from __future__ import annotations

from run.train.plan import Plan, Rows, Stage

_SHORT, _HALF, _WHOLE = Rows(16, 256, 256), Rows(8, 512, 256), Rows(4, 1024, 1024)
_1K, _2K, _4K = Rows(4, 1024, 256), Rows(2, 2048, 256), Rows(2, 4096, 256)
_FIRST = {"recall": 0.5, "transform": 0.5}
_ALL = {
    "recall": 0.22,
    "transform": 0.18,
    "tools": 0.14,
    "extraction": 0.12,
    "arithmetic": 0.2,
    "about": 0.06,
    "picture": 0.08,
}
_MIXED = {_SHORT: 0.6, _HALF: 0.15, _1K: 0.15, _WHOLE: 0.1}
_LONG = {_SHORT: 0.5, _HALF: 0.05, _1K: 0.2, _WHOLE: 0.05, _2K: 0.12, _4K: 0.08}

PLAN = Plan(
    (
        Stage("warm-up", 60, {_SHORT: 1.0}, _FIRST, (0.05, 1.0), longest=40, guide=1.0),
        Stage("words", 340, {_SHORT: 1.0}, _FIRST, (1.0, 1.0), longest=40, guide=1.0),
        Stage("short", 1_200, {_SHORT: 0.8, _HALF: 0.2}, _ALL, (1.0, 0.7), guide=1.0),
        Stage("all", 3_000, _MIXED, _ALL, (0.7, 0.5), guide=0.3, select=True),
        Stage("long", 5_000, _LONG, _ALL, (0.5, 0.25), guide=0.1, select=True),
        Stage("settle", 3_000, _LONG, _ALL, (0.25, 0.005), select=True, rounded=True),
    )
)

_BLOCKS = {_SHORT: 0.6, _HALF: 0.15, _WHOLE: 0.15, _1K: 0.05, _2K: 0.05}
DRAFTS = Plan(
    (
        Stage("warm-up", 40, _BLOCKS, _ALL, (0.05, 1.0), select=True, rounded=True),
        Stage("drafts", 700, _BLOCKS, _ALL, (1.0, 1.0), select=True, rounded=True),
        Stage("settle", 500, _BLOCKS, _ALL, (1.0, 0.02), select=True, rounded=True),
    )
)
"""Of the draft stages, on what the backbone was trained on. They read windows, so that long notes teach them little."""
