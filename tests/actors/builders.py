"""Messages with everything filled in, for tests that care about one field."""

from __future__ import annotations

import numpy as np

from actors.rules.slab import Slab, pack_header
from schemas.bulk import Handle, Payload
from schemas.handover import Dispatch, HandOver
from schemas.message import Role
from schemas.request import Limits, Sampling, Submit
from schemas.routing import LoadReported

GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=7)


def prompt_bytes(num_tokens: int, first: int = 100) -> bytes:
    return np.arange(first, first + num_tokens, dtype="<u4").tobytes()


def pack_slot(slab: Slab, key: bytes, parent: bytes, payload: bytes, *, approximate: bool) -> bytes:
    """All bytes of a slot."""
    return pack_header(slab, key, parent, payload, approximate=approximate) + payload


def submit(request_id: str = "r1", num_tokens: int = 5, max_tokens: int = 8, **fields: object) -> Submit:
    defaults: dict[str, object] = {
        "request_id": request_id,
        "recipe": "rc0",
        "tenant": "public",
        "prompt": Payload(inline=prompt_bytes(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "sampling": GREEDY,
        "limits": Limits(max_tokens=max_tokens),
    }
    return Submit(**{**defaults, **fields})  # type: ignore[arg-type]


def dispatch(request_id: str = "r1", num_tokens: int = 5, epoch: int = 1, max_tokens: int = 8) -> Dispatch:
    return Dispatch(
        request_id=request_id,
        entrypoint="e0",
        epoch=epoch,
        reservation=1,
        balancer="pb0",
        prompt=Payload(inline=prompt_bytes(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=GREEDY,
        limits=Limits(max_tokens=max_tokens),
    )


def hand_over(request_id: str = "r1", num_tokens: int = 5, max_tokens: int = 8, layout: str = "timed") -> HandOver:
    return HandOver(
        request_id=request_id,
        entrypoint="e0",
        epoch=1,
        reservation=1,
        balancer="db0",
        state=Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0),
        layout=layout,
        num_tokens=num_tokens,
        sampling=GREEDY,
        limits=Limits(max_tokens=max_tokens),
    )


def report(id: str, *, seq: int = 1, incarnation: str = "a", reservations: list[int] | None = None) -> LoadReported:
    return LoadReported(
        role=Role.PREFILL,
        id=id,
        incarnation=incarnation,
        seq=seq,
        pid=1,
        host="h",
        capacity_requests=4,
        capacity_tokens=1000,
        num_tokens=0,
        reservations=reservations or [],
    )
