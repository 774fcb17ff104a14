"""A script by chance: one seed, one script."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import structs

from run.simulate.chaos.grammar import NUM_GRAMMARS
from run.simulate.chaos.images import NUM_IMAGES
from run.simulate.chaos.script import (
    Apart,
    Ask,
    Disk,
    Fault,
    Hang,
    Kill,
    Leave,
    Messages,
    Replace,
    Restart,
    Script,
    Shape,
    Slow,
    Stand,
)

SPAN_S = 8.0
"""In which requests come; faults begin a little later at most."""

BLOCK = 128

_STEPS = [(60, 6), (240, 24), (240, 24), (360, 40), (360, 40), (360, 40)]
"""Milliseconds, and most tokens, of a step of decode: all as fast, in more or fewer messages."""


def script(seed: int) -> Script:
    """Of ten scripts one has no faults."""
    draw = random.Random(f"chaos {seed}")
    shape, make, num_asks = _shape(draw), _ask, draw.randint(2, 7)
    if draw.random() < 0.35:
        shape, make, num_asks = structs.replace(shape, decode=2, decode_tokens=896), _long_after_short, num_asks + 6
    asks = [_dressed(draw, shape, make(draw, number)) for number in range(num_asks)]
    num_faults = 0 if draw.random() < 0.1 else draw.choice([2, 2, 3, 4, 6, 9, 12])
    faults = sorted((_fault(draw, shape) for _ in range(num_faults)), key=lambda fault: fault.at_s)
    return Script(seed, shape, sorted(asks, key=lambda ask: ask.at_s), faults)


def _shape(draw: random.Random) -> Shape:
    step_ms, most_accepted = draw.choice(_STEPS)
    return Shape(
        entrypoints=draw.choice([1, 2]),
        prefill=2,
        decode=draw.choice([2, 2, 3]),
        balancers=draw.choice([1, 1, 2]),
        metadata=draw.choice([1, 1, 2]),
        writers=draw.choice([1, 1, 2]),
        decode_tokens=draw.choice([1280, 1280, 1280, 2048, 8192]),
        budget_slabs=draw.choice([2, 3, 8]),
        vision=draw.choice([0, 0, 0, 1, 2]),
        quota=draw.choice([0, 0, 0, 1, 2]),
        group=draw.choice(["", "", "", "decode", "decode", "prefill"]),
        step_ms=step_ms,
        most_accepted=most_accepted,
    )


def _ask(draw: random.Random, number: int) -> Ask:
    num_tokens = draw.choice([draw.randint(5, 120), BLOCK * draw.randint(1, 6), draw.randint(100, 800)])
    return Ask(
        at_s=_time(draw),
        id=f"r{number}",
        text=draw.randrange(3),
        num_tokens=num_tokens,
        max_tokens=draw.choice([1, draw.randint(2, 20), draw.randint(20, 150), 300, 400]),
        tenant=f"t{draw.randrange(2)}",
        seed=draw.randrange(1 << 30),
        temperature=draw.choice([0.0, 0.0, 1.0]),
        is_exact=draw.random() < 0.1,
        deadline_s=draw.choice([0.0, 0.0, 0.0, 0.0, 60.0, 20.0, 3.0, 0.5]),
        cancel_s=round(draw.uniform(0.001, 6.0), 3) if draw.random() < 0.15 else 0.0,
        top_logprobs=draw.choice([-1, -1, -1, -1, 0, 2]),
    )


def _long_after_short(draw: random.Random, number: int) -> Ask:
    """Short answers, and when decode has learnt from them how long answers are, long ones: not all will have room."""
    is_short = number < 4
    return structs.replace(
        _ask(draw, number),
        at_s=round((0.0 if is_short else 4.0) + draw.random() * 0.5, 3),
        num_tokens=draw.randint(20, 120),
        max_tokens=draw.randint(5, 20) if is_short else draw.randint(200, 350),
    )


def _dressed(draw: random.Random, shape: Shape, ask: Ask) -> Ask:
    """Some answers are of a grammar, some prompts have images, some tenants a limit."""
    num_images = draw.choice([1, 1, 2]) if shape.vision and draw.random() < 0.4 else 0
    return structs.replace(
        ask,
        grammar=draw.randint(1, NUM_GRAMMARS) if draw.random() < 0.15 else 0,
        images=draw.choices(range(NUM_IMAGES), k=num_images),
        tenant=draw.choice(["t0", "t1", "t2"]) if shape.quota else ask.tenant,
    )


def _time(draw: random.Random) -> float:
    """Often many at once."""
    return round(draw.choice([0.0, 3.0, draw.uniform(0.0, SPAN_S)]) + draw.random() * 0.2, 3)


def _fault(draw: random.Random, shape: Shape) -> Fault:
    make = draw.choices([make for make, _ in _MAKERS], [weight for _, weight in _MAKERS])[0]
    return make(draw, shape, round(draw.uniform(0.0, SPAN_S + 3.0), 3))


def _length(draw: random.Random, *choices: float) -> float:
    return round(draw.choice(choices) * draw.uniform(0.5, 1.0), 3)


def _names(shape: Shape, *roles: str) -> list[str]:
    numbers = {
        "entrypoint/e": shape.entrypoints,
        "prefill/p": shape.prefill,
        "decode/d": shape.decode,
        "prefill-balancer/pb": shape.balancers,
        "decode-balancer/db": shape.balancers,
        "metadata/m": shape.metadata,
        "writer/w": shape.writers,
        "kvstore/k": 1,
        "vision/v": shape.vision,
        "vision-balancer/vb": shape.balancers if shape.vision else 0,
        "quota/q": shape.quota,
    }
    chosen = [prefix for prefix in numbers if not roles or prefix.partition("/")[0] in roles]
    return [f"{prefix}{id}" for prefix in chosen for id in range(numbers[prefix])]


def _any(draw: random.Random, shape: Shape) -> str:
    """Mostly who has requests."""
    if draw.random() < 0.6:
        return draw.choice(_names(shape, "decode", "prefill", "vision"))
    return draw.choice(_names(shape))


def _messages(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    return Messages(
        at_s=at_s,
        for_s=_length(draw, 1.0, 4.0, 12.0),
        kind=draw.choice(
            ["tokens", "tokens", "asks", "asks", "answers", "answers", "reports", "frees", "cache", "exits"]
        ),
        fate=draw.choice(["lost", "lost", "twice", "late", "overtaken"]),
        one_in=draw.choice([1, 2, 3, 10]),
        seed=draw.randrange(1 << 30),
    )


def _apart(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    return Apart(at_s=at_s, for_s=_length(draw, 0.5, 4.0, 10.0, 20.0), name=_any(draw, shape))


def _kill(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    back_s = _length(draw, 0.1, 0.1, 1.0, 10.0)
    return Kill(at_s=at_s, name=_any(draw, shape), back_s=back_s, is_told=draw.random() < 0.8)


def _stand(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    for_s = _length(draw, 0.3, 3.0, 8.0, 20.0)
    return Stand(at_s=at_s, for_s=for_s, name=_any(draw, shape), is_watched=draw.random() < 0.6)


def _replace(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    name = draw.choice(_names(shape, "decode", "prefill"))
    return Replace(at_s=at_s, for_s=_length(draw, 6.0, 12.0, 20.0), name=name, more_s=_length(draw, 0.5, 5.0))


def _leave(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    roles = draw.choice([["decode"], ["decode", "prefill", "entrypoint", "vision", "writer"]])
    return Leave(at_s=at_s, name=draw.choice(_names(shape, *roles)), grace_s=draw.choice([0.0, 0.5, 3.0]))


def _slow(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    name = draw.choice(_names(shape, "decode", "prefill"))
    return Slow(at_s=at_s, for_s=_length(draw, 2.0, 10.0), name=name, factor=draw.choice([3.0, 10.0, 50.0]))


def _hang(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    """Often so long that the actor gives its engine up."""
    return Hang(at_s=at_s, for_s=_length(draw, 3.0, 12.0, 90.0), name=draw.choice(_names(shape, "decode", "prefill")))


def _disk(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    return Disk(
        at_s=at_s,
        what=draw.choice(["error", "error", "full", "flip", "flip", "truncate"]),
        name=draw.choice(_names(shape, "writer", "kvstore", "prefill")),
        num=draw.choice([1, 1, 5]),
        place=draw.random(),
    )


def _restart(draw: random.Random, shape: Shape, at_s: float) -> Fault:
    return Restart(at_s=at_s, for_s=_length(draw, 0.5, 3.0, 10.0), seed=draw.randrange(1 << 30))


_MAKERS: list[tuple[Callable[[random.Random, Shape, float], Fault], int]] = [
    (_messages, 6),
    (_apart, 2),
    (_kill, 4),
    (_stand, 3),
    (_replace, 1),
    (_leave, 4),
    (_slow, 1),
    (_hang, 1),
    (_disk, 2),
    (_restart, 1),
]
