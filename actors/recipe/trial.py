"""A grammar tried out before a request is taken on: whether it can be followed, in bounded time and memory.

llguidance bounds itself, but for one thing: how many patterns meet at one string (`{"allOf": [{"pattern": …}, …]}`),
where time and memory more than double with each of them (1.3 s and 150 MB for 19). So what could be that is tried in a
process of its own, which may take 5 s and 1 GiB.
"""

from __future__ import annotations

import functools
import random
import re
import resource
import subprocess
import sys
from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer

from actors.rules.grammars import Vocabulary, follow, reason


class Marks(NamedTuple):
    """The ids of the control tokens that grammars name."""

    think_end: int
    dsml: int


END = 256
MARKS = Marks(think_end=257, dsml=258)
"""Of grammars to be tried: there a token is a byte."""

TRIAL_S = 5.0
TRIAL_BYTES = 1 << 30

_NUM_STEPS = 256
_MANY_PATTERNS = 4
_PATTERNS = re.compile(r'"(?:pattern|format)": *"|"patternProperties"')
_MEETINGS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref)"')


def try_out(grammar: str) -> str:
    """Why this grammar, written with `MARKS`, cannot be followed; empty if it can. Takes milliseconds, 5 s at most."""
    if len(_PATTERNS.findall(grammar)) < _MANY_PATTERNS or not _MEETINGS.search(grammar):
        return walk(grammar)
    try:
        command = [sys.executable, "-m", __name__]
        tried = subprocess.run(command, input=grammar, capture_output=True, text=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return "Too complex: its patterns cannot be understood in time"
    return tried.stdout if tried.returncode == 0 else "Too complex: its patterns need too much memory"


def walk(grammar: str) -> str:
    """Follow it for some steps at random, always the same ones."""
    matcher = follow(_bytes(), grammar)
    chance = random.Random(0)
    for step in range(_NUM_STEPS):
        if matcher.is_error():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        others = allowed[allowed != END]
        if not len(others):
            is_possible = step > 0 or matcher.is_accepting()
            return reason(matcher) if is_possible else "Unsatisfiable schema: there is nothing that it allows"
        matcher.consume_token(int(chance.choice(others)))
    return reason(matcher)


@functools.cache
def _bytes() -> LLTokenizer:
    tokens = [bytes([byte]) for byte in range(256)]
    special = [b"<end>", b"</think>", "｜DSML｜".encode()]
    return Vocabulary([*tokens, *special], [END, *MARKS], END).tokenizer()


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    sys.stdout.write(walk(sys.stdin.read()))


if __name__ == "__main__":
    _main()
