"""A grammar tried out before a request is taken on: whether it can be followed, in bounded time and memory.

llguidance bounds itself, but for how many patterns meet at one string (`{"allOf": [{"pattern": …}, …]}`): with each of
them time and memory more than double (1.3 s and 150 MB for 19). And it has been seen to crash. So grammars are tried in
a process beside the recipe, which may work for 2 s and take 1 GiB. One that is its end costs the request that asked,
and is not tried again; the next one finds a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import random
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer

from actors.recipe.fields import Refusal
from actors.rules.grammars import Vocabulary, follow, reason, unspelt_of
from schemas.failure import Code
from supervisors.answerer import Answerer, Busy, Ended


class Marks(NamedTuple):
    """The ids of the control tokens that grammars name."""

    think_end: int
    dsml: int


END = 256
MARKS = Marks(think_end=257, dsml=258)
"""Of grammars to be tried: there a token is a byte."""

SPELLINGS = ("</think>", "｜DSML｜")
"""Of these control tokens, which the official library looks for in text."""

TRIAL_S = 2.0
"""Of work: how busy the processors are with other things says nothing of a grammar."""

TRIAL_BYTES = 1 << 30
PATIENCE_S = 15.0
"""For a process that hardly gets to work, and for one's turn."""

WAIT_S = 0.25
"""For one's turn among grammars that may take long: who tries them out does not take all threads."""

KEPT_LETHAL = 256
"""So many grammars that were the end of a process are remembered."""

_SPECIAL = {END: b"<end>", **{id: spelling.encode() for id, spelling in zip(MARKS, SPELLINGS, strict=True)}}
_NUM_STEPS = 256
_MANY_PATTERNS = 4
_PATTERNS = re.compile(r'"(?:pattern|format)": *"|"patternProperties"')
_MEETINGS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref)"')

_TOO_LONG = "Too complex: its patterns cannot be understood in time"
_TOO_MUCH = "Too complex: it needs too much memory, or breaks what would understand it"


class Trials(Answerer):
    """A process that tries one grammar after the other."""

    def __init__(self) -> None:
        super().__init__(__name__)
        self._lethal: dict[bytes, str] = {}

    def ask(self, grammar: str, wait_s: float) -> str:
        """What `walk` says. Raises Refusal (overloaded) if its turn does not come in time, or no answer."""
        text = grammar.encode()
        digest = hashlib.sha256(text).digest()
        if digest in self._lethal:
            return self._lethal[digest]
        try:
            return self.answer(text, [str(TRIAL_S)], wait_s=wait_s, patience_s=PATIENCE_S).decode()
        except Busy:
            raise Refusal(Code.OVERLOADED, "too many schemas are being tried here: retry later") from None
        except Ended as ended:
            if ended.code in (-signal.SIGKILL, -signal.SIGTERM):  # that may be another's doing
                raise Refusal(Code.OVERLOADED, "a schema could not be tried here in time: retry later") from None
            wrong = self._lethal[digest] = _TOO_LONG if ended.code == -signal.SIGPROF else _TOO_MUCH
            while len(self._lethal) > KEPT_LETHAL:
                del self._lethal[next(iter(self._lethal))]
            return wrong


_few, _many = Trials(), Trials()
"""For grammars with few patterns, and for the others, which can take long: those never wait for these."""


@atexit.register
def _close() -> None:
    for trials in (_few, _many):
        trials.close()


def try_out(grammar: str) -> str:
    """Why this grammar, written with `MARKS`, cannot be followed; empty if it can. Takes milliseconds, seconds at most.

    Raises Refusal (overloaded) when too many are being tried, or it does not come to its end.
    """
    if len(_PATTERNS.findall(grammar)) < _MANY_PATTERNS or not _MEETINGS.search(grammar):
        return _few.ask(grammar, PATIENCE_S)
    return _many.ask(grammar, WAIT_S)


def walk(grammar: str) -> str:
    """Follow it for some steps at random, always the same ones. As in an answer, no text may spell a control token."""
    matcher = follow(_bytes(), grammar)
    unspelt = [_SPECIAL[id] for id in unspelt_of(grammar)]
    chance, tail = random.Random(0), b""
    for step in range(_NUM_STEPS):
        if matcher.is_error():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        others = allowed[allowed != END]
        if not len(others):
            is_possible = step > 0 or matcher.is_accepting()
            return reason(matcher) if is_possible else "Unsatisfiable schema: there is nothing that it allows"
        for spelling in unspelt:
            if tail.endswith(spelling[:-1]):
                others = others[others != spelling[-1]]
                if not len(others):
                    return "" if END in allowed else f"{spelling.decode()!r} cannot be part of an answer"
        token = int(chance.choice(others))
        tail = tail + bytes([token]) if token < END else b""
        matcher.consume_token(token)
    return reason(matcher)


@functools.cache
def _bytes() -> LLTokenizer:
    tokens = [bytes([byte]) for byte in range(256)]
    return Vocabulary([*tokens, *_SPECIAL.values()], list(_SPECIAL), END).tokenizer()


def _main(fd: int, trial_s: float) -> None:
    """Answer until the other end is closed, or one of the limits ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: meant for the recipe, which closes its end
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(fd)
    with contextlib.suppress(EOFError):
        while True:
            grammar = connection.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_PROF, trial_s)
            connection.send_bytes(walk(grammar).encode())


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
