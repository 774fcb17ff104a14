"""Bugs to be planted in the actors: each is to break a rule that the fault simulator holds them to.

`python -m tests.run.planted` says how many seeds it takes to find each, and writes the least script that does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from actors.decode.actor import Decode
from actors.decode.slots import Slots
from actors.entrypoint.request import Request
from actors.entrypoint.shard import Shard
from actors.quota.quota import Bucket
from actors.vision import actor as vision
from actors.vision import queue
from bus.bus import Bus
from bus.shelf import Shelf
from bus.subjects import RELEASE_DECODE, RELEASE_PREFILL
from run.simulate.chaos.chance import script
from run.simulate.chaos.history import run
from run.simulate.chaos.script import Script, text
from run.simulate.chaos.shrink import shrink

MOST = 1000
"""Seeds in which each is to be found."""

Plant = Callable[[pytest.MonkeyPatch], None]


def no_deduplication(patch: pytest.MonkeyPatch) -> None:
    """The entrypoint takes tokens that it has for new ones."""
    accept = Request.accept

    def planted(self: Request, epoch: int, first: int, *rest: Any) -> Any:
        return accept(self, epoch, max(first, len(self.tokens)), *rest)

    patch.setattr(Request, "accept", planted)


def _skipped_release(role: str, subject: object) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        tell = Bus.tell

        async def planted(self: Bus, address: Any, message: Any, **rest: Any) -> None:
            if address.subject is not subject or not self.wire.name.startswith(role):  # type: ignore[attr-defined]
                await tell(self, address, message, **rest)

        patch.setattr(Bus, "tell", planted)

    return plant


def early_free_of_an_offer(patch: pytest.MonkeyPatch) -> None:
    """An offer to one receiver is free again before it has been pulled."""
    put = Shelf.put

    def planted(self: Shelf, address: str, data: bytes, lease_s: float, *rest: Any, is_shared: bool) -> Any:
        return put(self, address, data, lease_s if is_shared else 0.001, *rest, is_shared=is_shared)

    patch.setattr(Shelf, "put", planted)


def early_free_of_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A shared offer is free again when one has pulled it."""
    patch.setattr(Shelf, "acknowledge", lambda self, key, generation: self.revoke(key))


def any_tokens_count(patch: pytest.MonkeyPatch) -> None:
    """The entrypoint takes tokens and ends of any epoch."""
    hear = Shard.hear

    def planted(self: Shard, emitted: Any, now_s: float) -> Any:
        known = [self.get(id) for id in emitted.request_ids]
        epochs = [one.epoch if one else old for one, old in zip(known, emitted.epochs, strict=True)]
        return hear(self, structs.replace(emitted, epochs=epochs), now_s)

    patch.setattr(Shard, "hear", planted)


def any_claim_wins(patch: pytest.MonkeyPatch) -> None:
    """The entrypoint gives a request to whoever claims it."""
    claim = Request.claim
    patch.setattr(Request, "claim", lambda self, epoch, *rest: claim(self, self.epoch, *rest))


def decode_cancels_any(patch: pytest.MonkeyPatch) -> None:
    """A cancel of an owner that is over ends the present one."""
    cancel = Slots.cancel
    patch.setattr(Slots, "cancel", lambda self, id, epoch=0: cancel(self, id))


def grammars_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """Who goes on with a request follows its grammar from the start, not behind the output so far."""
    prepare = Decode._prepare
    patch.setattr(Decode, "_prepare", lambda self, generation, state, output: prepare(self, generation, state, []))


def images_are_their_size(patch: pytest.MonkeyPatch) -> None:
    """A vision replica takes images of one size for one image."""
    for module in (vision, queue):
        patch.setattr(module, "key_of", lambda image: ("", image.width, image.height))


def nobody_is_limited(patch: pytest.MonkeyPatch) -> None:
    """A quota actor forgets what it has let in."""
    patch.setattr(Bucket, "take", lambda self, num, now_ns: None)


PLANTS: dict[str, Plant] = {
    "no de-duplication": no_deduplication,
    "decode skips a release": _skipped_release("decode/", RELEASE_DECODE),
    "prefill skips a release": _skipped_release("prefill/", RELEASE_PREFILL),
    "a refused reservation is not released": _skipped_release("prefill/", RELEASE_DECODE),
    "an offer is freed early": early_free_of_an_offer,
    "a snapshot is freed early": early_free_of_a_snapshot,
    "tokens of any epoch count": any_tokens_count,
    "any claim wins": any_claim_wins,
    "decode cancels any epoch": decode_cancels_any,
    "grammars begin anew": grammars_begin_anew,
    "images are their size": images_are_their_size,
    "nobody is limited": nobody_is_limited,
}


def path_of(name: str) -> Path:
    """Where a script is that finds it."""
    return Path(f"tests/data/chaos/planted/{name.replace(' ', '-')}.json")


def first_seed(plant: Plant) -> tuple[int, Script] | None:
    """The first of MOST seeds that finds it, and the least script that does; None when none of them does."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(MOST):
            if (found := run(script(seed)).violation) is not None:
                return seed, shrink(script(seed), partial(_breaks, found.kind))
    return None


def _breaks(kind: str, some: Script) -> bool:
    found = run(some).violation
    return found is not None and found.kind == kind


if __name__ == "__main__":
    for name in sys.argv[1:] or PLANTS:
        found = first_seed(PLANTS[name])
        if found is not None:
            path_of(name).write_text(text(found[1]))
        sys.stdout.write(f"{name}: {'not found' if found is None else f'seed {found[0]}'}\n")
        sys.stdout.flush()
