"""The one map: every subject, its message, its reply, who listens.

An internal subject is `shoal.<role>.<destination>.<verb>`. The destination is an actor's id, `any` (one of the role,
by queue group) or `all` (every one of the role). Events use the pseudo-role `event` and the publisher's role as
destination. Public subjects are `shoal.api.<protocol>`, and `shoal.api.<tenant>.<protocol>` for a tenant with a user of
its own; they carry protocol JSON, not Structs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schemas.api import Answer, Call, Called, Probe, Probed, Protocol, StreamBatch
from schemas.cache import (
    AdoptSlab,
    BlocksDropped,
    BlocksDumped,
    BlocksFailed,
    BlocksFound,
    BlocksStored,
    BlocksTouched,
    BlocksWritten,
    DescribeSpace,
    DropBlocks,
    DumpBlocks,
    FindBlocks,
    HitShortened,
    MakeRoom,
    RoomMade,
    SnapshotsKept,
    SpaceDescribed,
    StoreBlocks,
)
from schemas.experts import ExpertsUsed, GroupBroken, MeetRanks, PlaceExperts, RankPresent, StepWanted
from schemas.handover import Claim, Claimed, ClaimRefused, Dispatch, Dispatched, HandedOver, HandOver, Refused
from schemas.liveness import Drain, Ping, Pong, ProcessExited
from schemas.message import Message, Role
from schemas.quota import AdmitCall, Admitted, TokensUsed
from schemas.request import Cancel, CancelAcknowledged, Resend, Submit, Submitted, Taken, TokensEmitted
from schemas.routing import LoadReported, Release, ReportLoad, Route, Routed
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

M = TypeVar("M", bound=Message)
R = TypeVar("R")

MAX_MESSAGE_BYTES = 256 * 1024
"""The size contract of internal messages, headers counted (design §4)."""

MAX_PUBLIC_BYTES = 8 * 1024 * 1024
"""The broker's max_payload: how large a public request body may be."""


@dataclass(frozen=True, slots=True)
class Address(Generic[M, R]):
    """One concrete place to send an M to; an ask there is answered with an R."""

    subject: Subject[M, R]
    name: str


@dataclass(frozen=True, slots=True)
class Subject(Generic[M, R]):
    """One kind of message at one role. R is None where nobody answers.

    `reply` is R at run time (a Struct or a union of Structs), or None. `is_early`: an actor that is not ready yet does
    not keep it waiting.
    """

    role: str
    verb: str
    message: type[M]
    reply: Any = None
    max_bytes: int = MAX_MESSAGE_BYTES
    is_early: bool = False

    def at(self, id: str) -> Address[M, R]:
        """The actor with this id."""
        return Address(self, f"shoal.{self.role}.{id}.{self.verb}")

    def any(self) -> Address[M, R]:
        """One actor of the role, chosen by the broker."""
        return Address(self, f"shoal.{self.role}.any.{self.verb}")

    def all(self) -> Address[M, R]:
        """Every actor of the role. An ask here takes the first answer."""
        return Address(self, f"shoal.{self.role}.all.{self.verb}")


# Edge and recipe
CALL: Subject[Call, Called | Answer] = Subject(Role.RECIPE, "call", Call, Called | Answer)
RECIPE_CANCEL: Subject[Cancel, CancelAcknowledged] = Subject(Role.RECIPE, "cancel", Cancel, CancelAcknowledged)
RECIPE_TOKENS: Subject[TokensEmitted, Taken] = Subject(Role.RECIPE, "tokens", TokensEmitted, Taken)
PROBE: Subject[Probe, Probed] = Subject(Role.RECIPE, "probe", Probe, Probed)
STREAM: Subject[StreamBatch, Taken] = Subject(Role.GATEWAY, "stream", StreamBatch, Taken)

# Entrypoint
SUBMIT: Subject[Submit, Submitted] = Subject(Role.ENTRYPOINT, "submit", Submit, Submitted)
CANCEL: Subject[Cancel, CancelAcknowledged] = Subject(Role.ENTRYPOINT, "cancel", Cancel, CancelAcknowledged)
CLAIM: Subject[Claim, Claimed | ClaimRefused] = Subject(Role.ENTRYPOINT, "claim", Claim, Claimed | ClaimRefused)
TOKENS: Subject[TokensEmitted, Taken] = Subject(Role.ENTRYPOINT, "tokens", TokensEmitted, Taken)
RESEND: Subject[Resend, TokensEmitted] = Subject(Role.ENTRYPOINT, "resend", Resend, TokensEmitted)
SHORTENED: Subject[HitShortened, Taken] = Subject(Role.ENTRYPOINT, "shortened", HitShortened, Taken)

# Balancers
ROUTE_PREFILL: Subject[Route, Routed] = Subject(Role.PREFILL_BALANCER, "route", Route, Routed)
RELEASE_PREFILL: Subject[Release, None] = Subject(Role.PREFILL_BALANCER, "release", Release)
ROUTE_DECODE: Subject[Route, Routed] = Subject(Role.DECODE_BALANCER, "route", Route, Routed)
RELEASE_DECODE: Subject[Release, None] = Subject(Role.DECODE_BALANCER, "release", Release)
ROUTE_VISION: Subject[Route, Routed] = Subject(Role.VISION_BALANCER, "route", Route, Routed)
RELEASE_VISION: Subject[Release, None] = Subject(Role.VISION_BALANCER, "release", Release)

# Vision
RESOLVE_IMAGE: Subject[ResolveImage, ImageResolved] = Subject(Role.VISION, "resolve", ResolveImage, ImageResolved)
ENCODE_IMAGE: Subject[EncodeImage, ImageEncoded] = Subject(Role.VISION, "encode", EncodeImage, ImageEncoded)
RELEASE_IMAGE: Subject[ReleaseImage, None] = Subject(Role.VISION, "release", ReleaseImage)
CANCEL_VISION: Subject[Cancel, CancelAcknowledged] = Subject(Role.VISION, "cancel", Cancel, CancelAcknowledged)

# Prefill
DISPATCH: Subject[Dispatch, Dispatched | Refused] = Subject(Role.PREFILL, "dispatch", Dispatch, Dispatched | Refused)
CANCEL_PREFILL: Subject[Cancel, CancelAcknowledged] = Subject(Role.PREFILL, "cancel", Cancel, CancelAcknowledged)
RESEND_PREFILL: Subject[Resend, TokensEmitted] = Subject(Role.PREFILL, "resend", Resend, TokensEmitted)

# Decode
HAND_OVER: Subject[HandOver, HandedOver | Refused] = Subject(Role.DECODE, "handover", HandOver, HandedOver | Refused)
CANCEL_DECODE: Subject[Cancel, CancelAcknowledged] = Subject(Role.DECODE, "cancel", Cancel, CancelAcknowledged)
RESEND_DECODE: Subject[Resend, TokensEmitted] = Subject(Role.DECODE, "resend", Resend, TokensEmitted)

# Ranks of a group, and where their experts are
STEP_PREFILL: Subject[StepWanted, None] = Subject(Role.PREFILL, "step", StepWanted)
STEP_DECODE: Subject[StepWanted, None] = Subject(Role.DECODE, "step", StepWanted)
PRESENT_PREFILL: Subject[RankPresent, None] = Subject(Role.PREFILL, "present", RankPresent, is_early=True)
PRESENT_DECODE: Subject[RankPresent, None] = Subject(Role.DECODE, "present", RankPresent, is_early=True)
MEET_PREFILL: Subject[MeetRanks, None] = Subject(Role.PREFILL, "meet", MeetRanks, is_early=True)
MEET_DECODE: Subject[MeetRanks, None] = Subject(Role.DECODE, "meet", MeetRanks, is_early=True)
PLACE_PREFILL: Subject[PlaceExperts, None] = Subject(Role.PREFILL, "place", PlaceExperts)
PLACE_DECODE: Subject[PlaceExperts, None] = Subject(Role.DECODE, "place", PlaceExperts)

# The KV cache
DESCRIBE: Subject[DescribeSpace, SpaceDescribed] = Subject(Role.PREFILL, "describe", DescribeSpace, SpaceDescribed)
FIND: Subject[FindBlocks, BlocksFound] = Subject(Role.METADATA, "find", FindBlocks, BlocksFound)
KEPT: Subject[SnapshotsKept, None] = Subject(Role.METADATA, "kept", SnapshotsKept)
STORE: Subject[StoreBlocks, BlocksWritten] = Subject(Role.WRITER, "store", StoreBlocks, BlocksWritten)
DUMP: Subject[DumpBlocks, BlocksDumped] = Subject(Role.WRITER, "dump", DumpBlocks, BlocksDumped)
DROP: Subject[DropBlocks, Taken] = Subject(Role.WRITER, "drop", DropBlocks, Taken)
ADOPT: Subject[AdoptSlab, Taken] = Subject(Role.WRITER, "adopt", AdoptSlab, Taken)
MAKE_ROOM: Subject[MakeRoom, RoomMade] = Subject(Role.KVSTORE, "room", MakeRoom, RoomMade)

# Quota
ADMIT: Subject[AdmitCall, Admitted] = Subject(Role.QUOTA, "admit", AdmitCall, Admitted)
USED: Subject[TokensUsed, Taken] = Subject(Role.QUOTA, "used", TokensUsed, Taken)

# Events: published at `.at(<role of the publisher>)`
LOAD: Subject[LoadReported, None] = Subject("event", "load", LoadReported)
EXITED: Subject[ProcessExited, None] = Subject("event", "exited", ProcessExited)
STORED: Subject[BlocksStored, None] = Subject("event", "stored", BlocksStored)
DROPPED: Subject[BlocksDropped, None] = Subject("event", "dropped", BlocksDropped)
TOUCHED: Subject[BlocksTouched, None] = Subject("event", "touched", BlocksTouched)
FAILED: Subject[BlocksFailed, None] = Subject("event", "failed", BlocksFailed)
EXPERTS: Subject[ExpertsUsed, None] = Subject("event", "experts", ExpertsUsed)
BROKEN: Subject[GroupBroken, None] = Subject("event", "broken", GroupBroken)


def ping(role: str) -> Subject[Ping, Pong]:
    """Every actor answers this."""
    return Subject(role, "ping", Ping, Pong, is_early=True)


def report_load(role: str) -> Subject[ReportLoad, None]:
    """Every actor hears this, at `.all()`."""
    return Subject(role, "report", ReportLoad)


def drain(role: str) -> Subject[Drain, LoadReported]:
    """Every actor hears this, and leaves."""
    return Subject(role, "drain", Drain, LoadReported)


API_PREFIX = "shoal.api."
INBOX_PREFIX = "_INBOX."
"""Where every client listens for answers; the rest of its inbox's name is its own secret."""

TENANT_INBOX_PREFIX = "_INBOX.tenant."
"""Where the users of tenants listen, each under its name."""

INTERNAL_INBOX = "_SHOAL"
"""Where we listen ourselves. Clients see the names there, as replies of our messages; they may not publish to them, and
`is_inbox` keeps us from doing it for them."""

MAX_REPLY_BYTES = 256
"""A client's reply subject; what we publish to it must stay within one line of the broker's protocol."""


def tenant_inbox(tenant: str) -> str:
    """All that a tenant's user may listen under. The name is no secret, so nobody else is answered there."""
    return f"{TENANT_INBOX_PREFIX}{tenant}"


def is_inbox(reply: str, tenant: str = "") -> bool:
    """Whether a stranger who asks may be answered there: it chooses the subject, and we may publish anywhere.

    `tenant` is the one whose subject it asked on; empty for those that are everyone's.
    """
    if len(reply.encode()) > MAX_REPLY_BYTES:
        return False
    if tenant:
        return reply.startswith(f"{tenant_inbox(tenant)}.")
    return reply.startswith(INBOX_PREFIX) and not reply.startswith(TENANT_INBOX_PREFIX)


def api(protocol: str, tenant: str = "") -> str:
    """The public subject of a protocol; for a tenant, the one that only its user may publish on."""
    return f"{API_PREFIX}{tenant}.{protocol}" if tenant else API_PREFIX + protocol


def read_api(subject: str) -> tuple[str, Protocol]:
    """What `api` was given: the tenant, empty for everyone's subject, and the protocol. Raises ValueError."""
    tenant, _, protocol = subject.removeprefix(API_PREFIX).rpartition(".")
    return tenant, Protocol(protocol)


SUBJECTS: tuple[Subject[Any, Any], ...] = (
    *(CALL, RECIPE_CANCEL, RECIPE_TOKENS, PROBE, STREAM),
    *(SUBMIT, CANCEL, CLAIM, TOKENS, RESEND),
    *(ROUTE_PREFILL, RELEASE_PREFILL, ROUTE_DECODE, RELEASE_DECODE, ROUTE_VISION, RELEASE_VISION),
    *(RESOLVE_IMAGE, ENCODE_IMAGE, RELEASE_IMAGE, CANCEL_VISION),
    *(DISPATCH, CANCEL_PREFILL, RESEND_PREFILL, HAND_OVER, CANCEL_DECODE, RESEND_DECODE),
    *(SHORTENED, DESCRIBE, FIND, KEPT, STORE, DUMP, DROP, ADOPT, MAKE_ROOM, ADMIT, USED),
    *(STEP_PREFILL, STEP_DECODE, PRESENT_PREFILL, PRESENT_DECODE, MEET_PREFILL, MEET_DECODE),
    *(PLACE_PREFILL, PLACE_DECODE),
    *(LOAD, EXITED, STORED, DROPPED, TOUCHED, FAILED, EXPERTS, BROKEN),
)
"""All of the above, for tests."""
