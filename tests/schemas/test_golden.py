"""The bytes of every message, fixed: what an older process sends must be understood, and the other way round.

`golden.txt` has a line for each of MESSAGES: its type and its bytes. A changed line is a change of the wire. A new
field needs a default and leaves the line alone (the 16th makes its head two bytes longer, which is read all the same);
a new message gets a new line.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import msgspec
import pytest

import schemas
from schemas.api import Answer, Call, Called, Probe, Probed, Protocol, StreamBatch
from schemas.bulk import Handle, Payload
from schemas.cache import (
    AdoptSlab,
    BlocksDropped,
    BlocksDumped,
    BlocksFailed,
    BlocksFound,
    BlocksStored,
    BlocksTouched,
    BlocksWritten,
    CachedPrefix,
    ChainEnd,
    DescribeSpace,
    DropBlocks,
    DumpBlocks,
    FindBlocks,
    HitShortened,
    MakeRoom,
    RoomMade,
    Snapshot,
    SnapshotsKept,
    SpaceDescribed,
    StoreBlocks,
)
from schemas.experts import ExpertsUsed, GroupBroken, MeetRanks, PlaceExperts, RankPresent, StepWanted
from schemas.failure import FAILURES, Code, Failure
from schemas.handover import Claim, Claimed, ClaimRefused, Dispatch, Dispatched, HandedOver, HandOver, Refused
from schemas.liveness import Drain, Ping, Pong, ProcessExited
from schemas.message import Message, Role
from schemas.quota import AdmitCall, Admitted, TokensUsed
from schemas.request import (
    Cancel,
    CancelAcknowledged,
    Cancelled,
    CancelReason,
    Failed,
    Finished,
    FinishReason,
    Limits,
    Preempted,
    Resend,
    Sampling,
    Submit,
    Submitted,
    Taken,
    TokenLogprobs,
    TokensEmitted,
)
from schemas.routing import LoadReported, Release, ReportLoad, Route, Routed
from schemas.vision import EncodeImage, Image, ImageEmbeddings, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

HANDLE = Handle(address="tcp://127.0.0.1:5", key="ab" * 16, generation=3, size_bytes=1 << 33, checksum=0xFFFFFFFF)
SAMPLING = Sampling(temperature=0.5, top_p=0.25, seed=(1 << 63) - 1)
LIMITS = Limits(max_tokens=300, deadline_ns=1 << 60)
FAILURE = Failure(code=Code.RATE_LIMITED, message="später", field="model", retry_after_s=1.5)
IMAGE = Image(start=5, num_tokens=184, digest="0d" * 16, width=546, height=300, vision="v", pixels=HANDLE)
KEY, PARENT, PLACE = bytes(range(16)), bytes(range(16, 32)), bytes(range(8))
SNAPSHOT = Snapshot(key=KEY, holder="prefill/p", handle=HANDLE, expires_ns=1 << 60)
CHAIN = ChainEnd(space="s", key=KEY, tokens=b"\x01\x00\x00\x00", digests=PARENT, approximate=True)

MESSAGES: list[Message] = [
    HANDLE,
    Payload(inline=b"\x00\xff"),
    Payload(handle=HANDLE),
    FAILURE,
    Failure(code=Code.INTERNAL, message=""),
    SAMPLING,
    LIMITS,
    Call(stream_id=7, gateway="g", protocol=Protocol.MESSAGES, body=Payload(inline=b"{}")),
    Call(stream_id=7, gateway="g", protocol=Protocol.CANCEL, body=Payload(), tenant="t", request_id="r", deadline_ns=1),
    Called(recipe="c", request_id="r", is_stream=True),
    Called(recipe="c", request_id="r", is_stream=False, ignored=["user"]),
    Answer(status=200, body=b"[]"),
    Answer(status=429, body=b"", failure=FAILURE),
    StreamBatch(stream_ids=[1, 300], seqs=[0, 70000], items=[b"a", b""]),
    StreamBatch(
        stream_ids=[1],
        seqs=[0],
        items=[b""],
        last=[0],
        statuses=[(0, 503)],
        large=[(0, HANDLE)],
        waits=[(0, 1.5)],
    ),
    Probe(gateway="g", stream_ids=[1, 2]),
    Probe(gateway="g", stream_ids=[1, 2], from_seqs=[0, 70000]),
    Probed(next_seqs=[0, -1]),
    Submit(
        request_id="r",
        recipe="c",
        tenant="t",
        prompt=Payload(inline=b"\x01\x00\x00\x00"),
        num_prompt_tokens=1,
        sampling=SAMPLING,
        limits=LIMITS,
    ),
    Submitted(shard="e"),
    Finished(reason=FinishReason.LENGTH),
    Cancelled(),
    Failed(failure=FAILURE),
    TokensEmitted(
        source="d",
        request_ids=["r", "s"],
        epochs=[1, 2],
        first_indexes=[0, 128],
        counts=[2, 0],
        tokens=[5, 129279],
        ends=[(1, Finished(reason=FinishReason.STOP)), (0, Cancelled()), (0, Failed(failure=FAILURE))],
    ),
    Taken(),
    Resend(request_ids=["r"], first_indexes=[4], epochs=[2]),
    Cancel(request_id="r"),
    Cancel(request_id="r", reason=CancelReason.CLIENT_GONE),
    CancelAcknowledged(request_id="r", was_running=True),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(handle=HANDLE),
        num_prompt_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
    ),
    Dispatched(pid=7),
    Refused(reason="full"),
    Refused(reason="never", is_final=True),
    HandOver(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        state=HANDLE,
        layout="v1",
        num_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
    ),
    HandedOver(),
    Claim(request_id="r", from_epoch=1, replica="d", pid=7),
    Claimed(epoch=2),
    ClaimRefused(reason="late"),
    Route(request_id="r", num_new=9),
    Route(request_id="r", num_new=9, num_cached=128, excluded=["p"]),
    Routed(replica="p", reservation=2, balancer="b"),
    Release(reservation=2),
    ReportLoad(),
    LoadReported(role=Role.DECODE, id="d", incarnation="i", seq=1, pid=2, host="h"),
    LoadReported(
        role=Role.PREFILL,
        id="d",
        incarnation="i",
        seq=1,
        pid=2,
        host="h",
        is_accepting=False,
        num_running=3,
        num_waiting=4,
        num_tokens=5,
        capacity_requests=6,
        capacity_tokens=7,
        reservations=[8],
        detail={"x": 0.5},
    ),
    Ping(),
    Pong(role="decode", id="d", incarnation="i", num_queued=3),
    Drain(grace_s=0.5, incarnation="i"),
    ProcessExited(name="n", pid=2, members=["decode/d"]),
    ResolveImage(image=Payload(inline=b"GIF")),
    ImageResolved(vision="v", digest="0d" * 16, width=546, height=300, num_tokens=184, pixels=HANDLE),
    IMAGE,
    EncodeImage(request_id="r", image=IMAGE, deadline_ns=1 << 60),
    ImageEncoded(vision="v", embeddings=HANDLE),
    ReleaseImage(held=HANDLE),
    ImageEmbeddings(start=5, num_tokens=184, embeddings=HANDLE),
    Submit(
        request_id="r",
        recipe="c",
        tenant="t",
        prompt=Payload(inline=b"\x01\x00\x00\x00"),
        num_prompt_tokens=1,
        sampling=SAMPLING,
        limits=LIMITS,
        images=[IMAGE],
        exact=True,
    ),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(handle=HANDLE),
        num_prompt_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
        images=[ImageEmbeddings(start=5, num_tokens=184, embeddings=HANDLE)],
        exact=True,
    ),
    SNAPSHOT,
    Snapshot(key=KEY, holder="decode/d", handle=HANDLE, expires_ns=1, approximate=True),
    FindBlocks(keys=KEY + PARENT),
    BlocksFound(locations=PLACE),
    BlocksFound(locations=PLACE, snapshots=[(0, SNAPSHOT)]),
    SnapshotsKept(snapshots=[SNAPSHOT]),
    StoreBlocks(space="s", keys=KEY, parents=PARENT, payloads=Payload(inline=b"kv")),
    StoreBlocks(space="s", keys=KEY, parents=PARENT, payloads=Payload(handle=HANDLE), approximate=True),
    BlocksWritten(num_new=3),
    BlocksStored(writer="w", incarnation="i", seq=1, keys=KEY, parents=PARENT, locations=PLACE),
    BlocksDropped(writer="w", incarnation="i", seq=2, keys=KEY, locations=PLACE),
    BlocksTouched(keys=KEY),
    BlocksFailed(keys=KEY, locations=PLACE, reason="checksum"),
    DumpBlocks(),
    DumpBlocks(shard="m0", shards=["m0", "m1"]),
    BlocksDumped(
        writer="w",
        incarnation="i",
        seq=7,
        slabs=[1, 1 << 38],
        keys=Payload(inline=KEY),
        parents=Payload(inline=PARENT),
        locations=Payload(inline=PLACE),
    ),
    DropBlocks(keys=KEY, locations=PLACE),
    MakeRoom(writer="w", num_slots=100, slab_bytes=1 << 24),
    RoomMade(may_add=True),
    AdoptSlab(name="0000000001.w.slab"),
    CachedPrefix(space="s", root=PARENT),
    CachedPrefix(
        space="s",
        root=PARENT,
        keys=KEY,
        locations=PLACE,
        num_blocks=1,
        snapshots=[(1, SNAPSHOT)],
        digests=PARENT,
    ),
    ChainEnd(space="s", key=KEY),
    CHAIN,
    HitShortened(request_id="r", epoch=2, num_blocks=3, start=256, approximate=True, reason="checksum"),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(inline=b"\x01\x00\x00\x00"),
        num_prompt_tokens=1,
        sampling=SAMPLING,
        limits=LIMITS,
        prefix=CachedPrefix(space="s", root=PARENT, keys=KEY),
    ),
    HandOver(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        state=HANDLE,
        layout="l",
        num_tokens=1,
        sampling=SAMPLING,
        limits=LIMITS,
        chain=CHAIN,
    ),
    TokensEmitted(
        source="e", request_ids=["r"], epochs=[1], first_indexes=[0], counts=[1], tokens=[5], cached=[(0, 1280)]
    ),
    AdmitCall(tenant="t", request_id="r", num_prompt_tokens=100),
    Admitted(),
    TokensUsed(tenant="t", request_id="r", num_output_tokens=7),
    DescribeSpace(),
    SpaceDescribed(space="s"),
    Submit(
        request_id="r",
        recipe="c",
        tenant="t",
        prompt=Payload(inline=b"\x01\x00\x00\x00"),
        num_prompt_tokens=1,
        sampling=SAMPLING,
        limits=LIMITS,
        cache="acme",
        branches=[1, 70000],
    ),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(handle=HANDLE),
        num_prompt_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
        branches=[1, 70000],
    ),
    Route(
        request_id="r",
        num_new=9,
        num_cached=256,
        num_replayed=128,
        num_blocks=2,
        deadline_ns=1 << 60,
        tenant="t",
        digest="0d" * 16,
    ),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(handle=HANDLE),
        num_prompt_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
        prefix=CachedPrefix(space="s", root=PARENT, keys=KEY, images_from=256),
        tenant="t",
    ),
    EncodeImage(request_id="r", image=IMAGE, reservation=2, balancer="b"),
    HitShortened(
        request_id="r", epoch=2, num_blocks=0, start=0, approximate=False, reason="checksum", is_returned=True
    ),
    ImageResolved(vision="v", digest="d", width=28, height=42, num_tokens=4, pixels=HANDLE, num_patches=6),
    Image(start=5, num_tokens=4, digest="d", width=28, height=42, vision="v", pixels=HANDLE, num_patches=6),
    Route(request_id="r", num_new=9, is_exact=True),
    StepWanted(generation=1 << 60, num_steps=70000),
    RankPresent(id="d-1", life=1 << 60, generation=7, is_waiting=True),
    MeetRanks(generation=8, ids=["d-1", "d-0"], lives=[1 << 60, 5], address="host:7000"),
    ExpertsUsed(
        role=Role.DECODE,
        id="d-1",
        group="d-0",
        rank=1,
        size=2,
        generation=1 << 60,
        num_steps=16,
        version=3,
        used=[b"\x01\x00\x00\x00", b"\xff\xff\xff\xff"],
        places=[b"\x00\x00", b"\x7f\x01"],
    ),
    PlaceExperts(generation=1 << 60, version=4, places=[b"\x00\x00", b"\x7f\x01"]),
    GroupBroken(role=Role.PREFILL, id="p-0", group="p-0", ranks=["p-0", "p-1"], reason="silent"),
    Sampling(temperature=0.5, top_p=0.25, seed=1 << 62, top_logprobs=20, grammar="start: /a/"),
    Limits(max_tokens=9, min_tokens=3),
    TokenLogprobs(sampled=[-0.5, -1.5], top_tokens=[7, 1 << 17], top=[-0.25, -2.0]),
    TokensEmitted(
        source="decode/d",
        request_ids=["r"],
        epochs=[1],
        first_indexes=[0],
        counts=[1],
        tokens=[5],
        logprobs=[(0, TokenLogprobs(sampled=[-0.5]))],
    ),
    Preempted(),
    TokensEmitted(
        source="d", request_ids=["r"], epochs=[1], first_indexes=[7], counts=[0], tokens=[], ends=[(0, Preempted())]
    ),
    Dispatch(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        prompt=Payload(handle=HANDLE),
        num_prompt_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
        num_output=3,
        is_protected=True,
    ),
    HandOver(
        request_id="r",
        entrypoint="e",
        epoch=1,
        reservation=2,
        balancer="b",
        state=HANDLE,
        layout="l",
        num_tokens=9,
        sampling=SAMPLING,
        limits=LIMITS,
        num_output=3,
        is_protected=True,
    ),
    Route(request_id="r", num_new=9, num_cached=256, is_whole=True),
]

GOLDEN = [line.split() for line in Path(__file__).with_name("golden.txt").read_text().splitlines()]


def every_message() -> set[type[Message]]:
    """All message types of the package."""
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")
    found, todo = set(), [Message]
    while todo:
        kinds = todo.pop().__subclasses__()
        found.update(kinds)
        todo += kinds
    return {kind for kind in found if kind.__module__.startswith("schemas.")}


def test_every_message_has_a_line() -> None:
    missing = every_message() - {type(message) for message in MESSAGES}
    assert missing == set(), f"add an instance and a line for {sorted(kind.__name__ for kind in missing)}"


@pytest.mark.parametrize(
    ("message", "line"), list(zip(MESSAGES, GOLDEN, strict=True)), ids=lambda value: type(value).__name__
)
def test_its_bytes_are_what_they_were(message: Message, line: list[str]) -> None:
    assert [type(message).__name__, msgspec.msgpack.encode(message).hex()] == line
    assert msgspec.msgpack.decode(bytes.fromhex(line[1]), type=type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_field_from_a_newer_process_is_ignored(message: Message) -> None:
    newer = {**msgspec.msgpack.decode(msgspec.msgpack.encode(message)), "from_the_future": [1, {"a": b""}]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=type(message)) == message


def test_tags_are_unique_and_messages_are_frozen() -> None:
    kinds = every_message()
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    assert all(kind.__struct_config__.frozen for kind in kinds)


def test_every_failure_code_says_what_it_means() -> None:
    assert set(FAILURES) == set(Code)
    assert all(400 <= row.http_status <= 599 and row.what_to_do for row in FAILURES.values())
