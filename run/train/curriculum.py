"""The plan of the bundled model: from short conversations to notes of 4,096 tokens, then ever smaller steps."""

from __future__ import annotations

from run.train.plan import Plan, Rows, Stage

_SHORT, _HALF, _WHOLE = Rows(16, 256, 256), Rows(8, 512, 256), Rows(4, 1024, 1024)
_1K, _2K, _4K = Rows(4, 1024, 256), Rows(2, 2048, 256), Rows(2, 4096, 256)
_FIRST = {"recall": 0.5, "transform": 0.5}
_ALL = {
    "recall": 0.18,
    "transform": 0.16,
    "tools": 0.14,
    "extraction": 0.12,
    "arithmetic": 0.2,
    "about": 0.07,
    "picture": 0.13,
}
_MIXED = {_SHORT: 0.6, _HALF: 0.15, _1K: 0.15, _WHOLE: 0.1}
_LONG = {_SHORT: 0.5, _HALF: 0.05, _1K: 0.2, _WHOLE: 0.05, _2K: 0.12, _4K: 0.08}

PLAN = Plan(
    (
        Stage("warm-up", 60, {_SHORT: 1.0}, _FIRST, (0.05, 1.0), longest=40, guide=1.0),
        Stage("words", 200, {_SHORT: 1.0}, _FIRST, (1.0, 1.0), longest=40, guide=1.0),
        Stage("short", 900, {_SHORT: 0.85, _HALF: 0.15}, _ALL, (1.0, 0.8), guide=1.0),
        Stage("all", 1_000, _MIXED, _ALL, (0.8, 0.6), guide=0.5, select=True),
        Stage("long", 1_600, _LONG, _ALL, (0.6, 0.4), guide=0.25, select=True),
        Stage("settle", 1_400, _LONG, _ALL, (0.4, 0.005), select=True, rounded=True),
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
