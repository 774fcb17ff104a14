"""From entrypoint to prefill to decode: dispatch, hand-over, claim."""

from __future__ import annotations

from schemas.bulk import Handle, Payload
from schemas.cache import CachedPrefix, ChainEnd
from schemas.message import Message
from schemas.request import Limits, Sampling
from schemas.vision import ImageEmbeddings


class Dispatch(Message, frozen=True):
    """Entrypoint → prefill replica: compute this prompt, then hand it over to decode.

    `images` are held for the replica until it has answered. `exact`: compute everything, approximate nothing.
    `prefix`: what is cached of it; without it nothing is, and nothing is stored. `branches`, `tenant`: as in `Submit`.
    `images` are all that reach past token `prefix.images_from`. A replica that has to compute one it was not given
    returns the request (`HitShortened`).
    The last `num_output` tokens of the prompt are output already, of an owner that has let go of the request: `limits`
    count them. `is_protected`: it is not to be preempted (any more), and waits until there is room for all of it.
    """

    request_id: str
    entrypoint: str
    epoch: int
    reservation: int
    balancer: str
    prompt: Payload
    num_prompt_tokens: int
    sampling: Sampling
    limits: Limits
    images: list[ImageEmbeddings] = []
    exact: bool = False
    prefix: CachedPrefix | None = None
    branches: list[int] = []
    tenant: str = ""
    num_output: int = 0
    is_protected: bool = False


class Dispatched(Message, frozen=True):
    """The prefill replica has queued the request, in this process, and in this generation of its group if it is in
    one."""

    pid: int = 0
    generation: int = 0


class Refused(Message, frozen=True):
    """Not here, not now: route again with this replica excluded. `is_final`: no replica like this one ever can."""

    reason: str
    is_final: bool = False


class HandOver(Message, frozen=True):
    """Prefill, or a decode replica that leaves → decode replica: pull this request's state, claim it, and generate from
    index `num_output` on.

    `state` is the engine's own format (caches, rings, pair state, last hidden row) under `layout`. `chain`: how to name
    the blocks that fill up; without it they are not stored. `num_output`, of `num_tokens`, `is_protected` and `tenant`:
    as in `Dispatch`. From decode, the last of these tokens is in no cache yet: it is the first to be fed.
    """

    request_id: str
    entrypoint: str
    epoch: int
    reservation: int
    balancer: str
    state: Handle
    layout: str
    num_tokens: int
    sampling: Sampling
    limits: Limits
    chain: ChainEnd | None = None
    num_output: int = 0
    is_protected: bool = False
    tenant: str = ""


class HandedOver(Message, frozen=True):
    """The decode replica owns the request; the source may free it."""


class Claim(Message, frozen=True):
    """New owner → entrypoint shard: I have the state of this request, in this process, and in this generation of my
    group if I am in one. First claim from an epoch wins."""

    request_id: str
    from_epoch: int
    replica: str
    pid: int = 0
    generation: int = 0


class Claimed(Message, frozen=True):
    """The claim was first: go on under this epoch."""

    epoch: int


class ClaimRefused(Message, frozen=True):
    """Someone was first, or the request has ended: drop the state."""

    reason: str
