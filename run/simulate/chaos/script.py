"""The words of a fault script: what clients ask, and what goes wrong, each at its second of virtual time.

Every event stands for itself: it has its own seed where it needs chance, so that a script from which others are taken
away still does the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["tokens", "asks", "answers", "reports", "frees", "cache", "exits"]
"""Classes of subjects: see `run/simulate/chaos/broker.py`."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many there are of each, and how little room: `decode_tokens` of a decode replica, `budget_slabs` of the
    folder. A decode step takes `step_ms` and gives a request `most_accepted` tokens at most. All replicas of role
    `group`, if there is one, are the ranks of an expert-parallel group."""

    entrypoints: int = 2
    prefill: int = 2
    decode: int = 2
    balancers: int = 1
    metadata: int = 1
    writers: int = 1
    decode_tokens: int = 2048
    budget_slabs: int = 8
    step_ms: int = 60
    most_accepted: int = 6
    vision: int = 0
    quota: int = 0
    group: Literal["", "decode", "prefill"] = ""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, forbid_unknown_fields=True):
    """Something that happens `at_s` after the system has come up."""

    at_s: float


class Ask(Event, frozen=True):
    """A client asks: the first `num_tokens` of text number `text`, with these `images` between, by number; the answer
    is to be of `grammar` number so and so, 0 is none. It cancels after `cancel_s`, if that is not 0; its deadline is
    `deadline_s` later, or there is none."""

    id: str
    text: int
    num_tokens: int
    max_tokens: int
    tenant: str = "t0"
    seed: int = 0
    temperature: float = 0.0
    is_exact: bool = False
    deadline_s: float = 0.0
    cancel_s: float = 0.0
    top_logprobs: int = -1
    grammar: int = 0
    images: list[int] = []


class Messages(Event, frozen=True):
    """For `for_s`, one in `one_in` messages of a kind is lost, comes twice, comes late, or is overtaken by others."""

    for_s: float
    kind: Kind
    fate: Literal["lost", "twice", "late", "overtaken"]
    one_in: int
    seed: int


class Apart(Event, frozen=True):
    """For `for_s` nothing reaches an actor, and nothing comes from it."""

    for_s: float
    name: str


class Kill(Event, frozen=True):
    """An actor ends without a word and is started anew after `back_s`. `is_told`: that its process exited."""

    name: str
    back_s: float
    is_told: bool = True


class Stand(Event, frozen=True):
    """An actor stands still for `for_s`, as after SIGSTOP. `is_watched`: when it has for too long, it is killed, and
    started anew. Else it goes on then, as if nothing had been."""

    for_s: float
    name: str
    is_watched: bool = True


class Replace(Event, frozen=True):
    """A replica stands still, and another is started in its place, of the same name, as if its machine were out of
    reach. After `for_s` the first goes on, as if nothing had been; `more_s` later it ends without a word."""

    for_s: float
    name: str
    more_s: float


class Leave(Event, frozen=True):
    """A replica is drained: it has `grace_s` to go on, then sees off what it has, ends, and is started anew."""

    name: str
    grace_s: float


class Slow(Event, frozen=True):
    """For `for_s` an engine takes `factor` times as long."""

    for_s: float
    name: str
    factor: float


class Hang(Event, frozen=True):
    """For `for_s` a step of an engine does not end, while its actor goes on."""

    for_s: float
    name: str


class Disk(Event, frozen=True):
    """The next `num` operations of an actor on files fail; or a byte turns, or the end is lost, of some file at
    `place`, from 0 to 1."""

    what: Literal["error", "full", "flip", "truncate"]
    name: str
    num: int = 1
    place: float = 0.0


class Restart(Event, frozen=True):
    """The broker is away for `for_s`; then all connect again, each after its own time."""

    for_s: float
    seed: int


Fault = Messages | Apart | Kill | Stand | Replace | Leave | Slow | Hang | Disk | Restart


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One history: the seed of all other chance, and the events."""

    seed: int
    shape: Shape
    asks: list[Ask]
    faults: list[Fault]

    @property
    def calm_s(self) -> float:
        """From then on nothing goes wrong any more."""
        return max((fault.at_s + length_s(fault) for fault in self.faults), default=0.0)


def length_s(fault: Fault) -> float:
    """How long it lasts."""
    if isinstance(fault, Replace):
        return fault.for_s + fault.more_s
    return fault.back_s if isinstance(fault, Kill) else getattr(fault, "for_s", 0.0)


def read(path: Path) -> Script:
    """Raises OSError, or msgspec.MsgspecError for what is no script."""
    return msgspec.json.decode(path.read_bytes(), type=Script)


def text(script: Script) -> str:
    """As JSON, an event a line."""

    def lines(events: list[Ask] | list[Fault]) -> str:
        return ",\n  ".join(msgspec.json.encode(event).decode() for event in events)

    shape = msgspec.json.encode(script.shape).decode()
    asks, faults = lines(script.asks), lines(script.faults)
    return f'{{"seed": {script.seed}, "shape": {shape},\n "asks": [\n  {asks}],\n "faults": [\n  {faults}]}}\n'
