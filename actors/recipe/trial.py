"""A grammar tried out before a request is taken on: whether it can be followed, in bounded time and memory.

llguidance bounds itself, but for one thing: how many patterns meet at one string (`{"allOf": [{"pattern": …}, …]}`),
where time and memory more than double with each of them (1.3 s and 150 MB for 19). So what could be that is tried in a
process of its own, which may work for 2 s and take 1 GiB.
"""

from __future__ import annotations

import functools
import random
import re
import resource
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer

from actors.recipe.fields import Refusal
from actors.rules.grammars import Vocabulary, follow, reason
from schemas.failure import Code


class Marks(NamedTuple):
    """The ids of the control tokens that grammars name."""

    think_end: int
    dsml: int


END = 256
MARKS = Marks(think_end=257, dsml=258)
"""Of grammars to be tried: there a token is a byte."""

TRIAL_S = 2.0
"""Of work: how busy the processors are with other things says nothing of a grammar."""

TRIAL_BYTES = 1 << 30
PATIENCE_S = 15.0
"""For a process that hardly gets to work."""

MOST_TRIALS = 2
"""Processes at a time: who tries things out takes neither all threads nor all memory."""

_trials: set[object] = set()

_NUM_STEPS = 256
_MANY_PATTERNS = 4
_PATTERNS = re.compile(r'"(?:pattern|format)": *"|"patternProperties"')
_MEETINGS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref)"')


def try_out(grammar: str) -> str:
    """Why this grammar, written with `MARKS`, cannot be followed; empty if it can. Takes milliseconds, seconds at most.

    Raises Refusal when it would need a process, and there are enough of them, or it does not come to its end.
    """
    if len(_PATTERNS.findall(grammar)) < _MANY_PATTERNS or not _MEETINGS.search(grammar):
        return walk(grammar)
    if len(_trials) >= MOST_TRIALS:
        raise Refusal(Code.OVERLOADED, f"{MOST_TRIALS} schemas with many patterns are being tried here: retry later")
    _trials.add(trial := object())
    try:
        command = [sys.executable, "-m", __name__, str(TRIAL_S)]
        tried = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise Refusal(Code.OVERLOADED, "a schema could not be tried here in time: retry later") from None
    finally:
        _trials.remove(trial)
    if tried.returncode == -signal.SIGPROF:
        return "Too complex: its patterns cannot be understood in time"
    return tried.stdout.decode() if tried.returncode == 0 else "Too complex: its patterns need too much memory"


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
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # it ends with the signal
    sys.stdout.buffer.write(walk(sys.stdin.buffer.read().decode()).encode())


if __name__ == "__main__":
    _main()
