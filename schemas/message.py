"""The base of everything that travels on the bus."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, kw_only=True):
    """A frozen, tagged message. The tag is the class name; never rename a class without a new version.

    New fields need a default. Fields are never re-typed or re-used (golden bytes in tests/schemas hold this).
    """


class Role(StrEnum):
    """Who can be addressed; the second token of every internal subject."""

    GATEWAY = "gateway"
    RECIPE = "recipe"
    ENTRYPOINT = "entrypoint"
    PREFILL_BALANCER = "prefill-balancer"
    DECODE_BALANCER = "decode-balancer"
    VISION_BALANCER = "vision-balancer"
    EXPERT_BALANCER = "expert-balancer"
    VISION = "vision"
    PREFILL = "prefill"
    DECODE = "decode"
    METADATA = "metadata"
    KVSTORE = "kvstore"
    WRITER = "writer"
    QUOTA = "quota"
