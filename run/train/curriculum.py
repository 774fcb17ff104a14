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
_FOCUS = {
    "recall": 0.07,
    "transform": 0.18,
    "tools": 0.12,
    "extraction": 0.14,
    "arithmetic": 0.18,
    "about": 0.06,
    "picture": 0.25,
}
_LAST = {
    "recall": 0.05,
    "transform": 0.18,
    "tools": 0.09,
    "extraction": 0.15,
    "arithmetic": 0.21,
    "about": 0.07,
    "picture": 0.25,
}
_PICTURES = {
    "recall": 0.03,
    "transform": 0.14,
    "tools": 0.05,
    "extraction": 0.1,
    "arithmetic": 0.13,
    "about": 0.05,
    "picture": 0.5,
}
_MIXED = {_SHORT: 0.6, _HALF: 0.15, _1K: 0.15, _WHOLE: 0.1}
_LONG = {_SHORT: 0.5, _HALF: 0.05, _1K: 0.2, _WHOLE: 0.05, _2K: 0.12, _4K: 0.08}
_LONGER = {_SHORT: 0.52, _1K: 0.1, _WHOLE: 0.05, _2K: 0.16, _4K: 0.17}

PLAN = Plan(
    (
        Stage("warm-up", 60, {_SHORT: 1.0}, _FIRST, (0.05, 1.0), longest=40, guide=1.0),
        Stage("words", 200, {_SHORT: 1.0}, _FIRST, (1.0, 1.0), longest=40, guide=1.0),
        Stage("short", 900, {_SHORT: 0.85, _HALF: 0.15}, _ALL, (1.0, 0.8), guide=1.0),
        Stage("all", 1_000, _MIXED, _ALL, (0.8, 0.6), guide=0.5, select=True),
        Stage("long", 900, _LONG, _ALL, (0.6, 0.4875), guide=0.25, select=True),
        Stage("focus", 700, _LONG, _FOCUS, (0.4875, 0.4), guide=0.25, select=True),
        Stage("settle", 740, _LONGER, _LAST, (0.4, 0.156416666666667), select=True, rounded=True),
        Stage("pictures", 760, _LONGER, _PICTURES, (0.156416666666667, 0.005), select=True, rounded=True),
    )
)

_BLOCKS = {_SHORT: 0.6, _HALF: 0.15, _WHOLE: 0.15, _1K: 0.05, _2K: 0.05}
DRAFTS = Plan(
    (
        Stage("warm-up", 40, _BLOCKS, _ALL, (0.05, 1.0), select=True, rounded=True),
        Stage("drafts", 620, _BLOCKS, _ALL, (1.0, 1.0), select=True, rounded=True),
        Stage("settle", 440, _BLOCKS, _ALL, (1.0, 0.02), select=True, rounded=True),
    )
)
"""Of the draft stages, on what the backbone was trained on. They read windows, so that long notes teach them little."""
