"""The look-up's decisions: whose keys, the first miss over all shards, and what is planned on it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.entrypoint.lookup import MAX_BLOCKS, Found, Names, can_be_named, gather, name, plan, scatter
from actors.entrypoint.peers import Peers
from actors.entrypoint.request import Request
from actors.rules import chain
from actors.rules.hit import Hit, hit, usable_blocks
from actors.rules.keys import keys as key_array
from actors.rules.keys import owners
from actors.rules.owner import EXPIRY_S
from bus.subjects import MAX_MESSAGE_BYTES
from schemas.bulk import Handle, Payload
from schemas.cache import BlocksFound, FindBlocks, Snapshot
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import Routed
from schemas.vision import Image
from tests.actors.builders import prompt_bytes, report, submit

HANDLE = Handle(address="tcp://192.168.100.200:65535", key="k" * 32, generation=9, size_bytes=1 << 20, checksum=1 << 31)


def key(number: int) -> bytes:
    return np.random.default_rng(number).bytes(16)


def snapshot(key: bytes, *, expires_ns: int = 100, approximate: bool = False) -> Snapshot:
    return Snapshot(key=key, holder="prefill/p0", handle=HANDLE, expires_ns=expires_ns, approximate=approximate)


def location(number: int, *, approximate: bool = False) -> int:
    return number << 25 | approximate


def answer_of(asked: bytes, stored: dict[bytes, int], snapshots: dict[bytes, Snapshot]) -> BlocksFound:
    """As a shard does."""
    keys = [asked[i : i + 16] for i in range(0, len(asked), 16)]
    num = next((i for i, one in enumerate(keys) if one not in stored), len(keys))
    found = np.array([stored[one] for one in keys[:num]], dtype="<u8").tobytes()
    kept = [(i, snapshots[one]) for i, one in enumerate(keys[:num]) if one in snapshots]
    return BlocksFound(locations=found, snapshots=kept)


@given(st.data())
def test_scattered_and_gathered_it_is_what_one_shard_would_say(data: st.DataObject) -> None:
    keys = [key(number) for number in range(data.draw(st.integers(0, 40)))]
    shards = [f"m{number}" for number in range(data.draw(st.integers(0, 5)))]
    numbers = st.integers(0, max(len(keys) - 1, 0))
    missing = data.draw(st.sets(numbers, max_size=3))
    silent = data.draw(st.sets(st.sampled_from(shards), max_size=1)) if shards else set()
    stored = {one: location(number) for number, one in enumerate(keys) if number not in missing}
    kept = {number: data.draw(st.integers(99, 101)) for number in data.draw(st.sets(numbers)) if keys}
    snapshots = {keys[number]: snapshot(keys[number], expires_ns=until) for number, until in kept.items()}

    joined = b"".join(keys)
    questions = scatter(joined, shards)
    asked = [one for positions, _ in questions.values() for one in positions]
    assert sorted(asked) == list(range(len(keys) if shards else 0))
    answers = {
        shard: answer_of(question.message.keys, stored, snapshots)
        for shard, question in questions.items()
        if shard not in silent
    }
    found = gather(joined, questions, answers, now_ns=100)

    owner = [shards[number] for number in owners(key_array(joined), shards)] if shards and keys else []
    there = [one in stored and bool(shards) and owner[number] not in silent for number, one in enumerate(keys)]
    expected = there.index(False) if False in there else len(there)
    assert found.num_blocks == expected
    assert found.locations == np.array([location(number) for number in range(expected)], dtype="<u8").tobytes()
    assert found.snapshots == {n + 1: snapshots[keys[n]] for n, until in kept.items() if n < expected and until > 100}


@pytest.mark.parametrize("locations", [b"", b"1234567", bytes(8 * 5), bytes(8 * 3 + 7)])
def test_an_answer_that_is_too_long_or_torn_is_no_more_than_what_was_asked(locations: bytes) -> None:
    keys = b"".join(map(key, range(4)))
    questions = scatter(keys, ["m0"])
    wrong = [(number, snapshot(key(number % 4))) for number in (-1, 3, 4, 9)]
    found = gather(keys, questions, {"m0": BlocksFound(locations=locations, snapshots=wrong)}, 0)
    assert found.num_blocks == min(len(locations) // 8, 4)
    assert set(found.snapshots) <= {4}


def test_windows_of_another_block_are_none() -> None:
    keys = b"".join(map(key, range(2)))
    answers = {"m0": BlocksFound(locations=bytes(16), snapshots=[(0, snapshot(key(1))), (1, snapshot(key(1)))])}
    assert set(gather(keys, scatter(keys, ["m0"]), answers, 0).snapshots) == {2}


NAMES = Names("s", bytes(16), b"".join(map(key, range(10))), b"")


def found(num_blocks: int, ends: dict[int, bool], approximate: int | None = None) -> Found:
    words = [location(number, approximate=number == approximate) for number in range(num_blocks)]
    locations = np.array(words, dtype="<u8").tobytes()
    return Found(locations, {end: snapshot(key(end - 1), approximate=how) for end, how in ends.items()})


@pytest.mark.parametrize(
    ("what", "num_restored", "tried", "start", "is_approximate"),
    [
        (found(0, {}), 0, [], 0, False),
        (found(1, {}), 0, [], 0, False),
        (found(1, {1: False}), 1, [1], 128, False),
        (found(10, {9: False, 8: False, 7: False}), 9, [9, 8], 9 * 128, False),
        (found(10, {8: False, 10: False}), 9, [8], 8 * 128, False),
        (found(10, {}), 9, [], 8 * 128, True),
        (found(5, {5: False}, approximate=4), 5, [5], 5 * 128, True),
        (found(5, {4: False}, approximate=4), 5, [4], 4 * 128, False),
        (found(5, {5: True, 4: False}), 5, [5, 4], 5 * 128, True),
        (found(5, {5: False, 4: True}), 5, [5, 4], 5 * 128, False),
    ],
)
def test_the_plan(what: Found, num_restored: int, tried: list[int], start: int, is_approximate: bool) -> None:
    planned = plan(NAMES, what, 10 * 128 + 5)
    assert planned.prefix.num_blocks == num_restored
    assert [end for end, _ in planned.prefix.snapshots] == tried
    assert (planned.hit.start, planned.is_approximate) == (start, is_approximate)
    assert planned.prefix.locations == what.locations and planned.prefix.keys == NAMES.keys


@given(st.integers(0, 10), st.sets(st.integers(1, 10)), st.integers(1280, 1407))
def test_prefill_can_find_the_plan_again_in_its_prefix(num_found: int, ends: set[int], num_tokens: int) -> None:
    what = found(num_found, {end: False for end in ends if end <= num_found})
    planned = plan(NAMES, what, num_tokens)
    assert planned.hit == hit(planned.prefix.num_blocks, num_tokens, [end for end, _ in planned.prefix.snapshots])
    assert planned.prefix.num_blocks in (0, usable_blocks(num_found, num_tokens))


def image(start: int, num_tokens: int, digest: str) -> Image:
    return Image(start=start, num_tokens=num_tokens, digest=digest, width=1, height=1, vision="v", pixels=HANDLE)


def test_names_are_those_of_the_chain_under_model_and_salt() -> None:
    images = [image(100, 60, "ab" * 16), image(390, 20, "cd" * 16)]
    asked = submit(num_tokens=400, images=images, cache="acme")
    named = name("space", asked, asked.prompt.inline)
    root = chain.root("space", b"acme")
    spans = [chain.Span(one.start, one.num_tokens, bytes.fromhex(one.digest)) for one in images]
    assert (named.space, named.root, named.num_blocks) == ("space", root, 3)
    assert named.keys == b"".join(chain.chain(root, np.arange(100, 500, dtype=np.uint32), spans))
    assert named.digests == bytes.fromhex("cd" * 16)
    assert named.key(2) == named.keys[32:48]
    others = (submit(num_tokens=400, images=images), submit(num_tokens=400, images=images[1:], cache="acme"))
    for other in (name("other", asked, asked.prompt.inline), *(name("space", o, asked.prompt.inline) for o in others)):
        assert not {other.key(number) for number in range(3)} & {named.key(number) for number in range(3)}


def test_a_prompt_that_is_not_what_was_announced_has_no_names() -> None:
    assert can_be_named(prompt_bytes(5), 5)
    assert not can_be_named(prompt_bytes(4), 5)
    assert not can_be_named(prompt_bytes(5)[:-1], 5)
    num_over = (MAX_BLOCKS + 1) * 128
    assert not can_be_named(bytes(4 * num_over), num_over)


@pytest.mark.parametrize("num_blocks", [8192, MAX_BLOCKS])
def test_what_travels_of_a_long_prompt_fits_in_messages(num_blocks: int) -> None:
    """A million tokens, and the most there can be; with everything found, and in one shard."""
    keys = np.random.default_rng(0).bytes(16 * num_blocks)
    num_tokens = 128 * num_blocks + 127
    questions = scatter(keys, ["m0"])
    answer = BlocksFound(locations=b"\xff" * 8 * num_blocks, snapshots=[(n, snapshot(key(0))) for n in range(4)])
    ends = {end: snapshot(keys[16 * (end - 1) : 16 * end]) for end in (num_blocks - 1, num_blocks - 2)}
    planned = plan(Names("s" * 200, bytes(16), keys, bytes(16 * 128)), Found(answer.locations, ends), num_tokens)
    assert planned.hit == Hit(num_blocks - 1, 128 * (num_blocks - 1)) and len(planned.prefix.snapshots) == 2
    request = Request(submit(num_prompt_tokens=num_tokens), iter([1 << 62]), 0.0)
    request.was_looked_up(Names("s", bytes(16), keys, b""), planned, 0.0)
    request.dispatch("p0", 0.0)
    routed = Routed(replica="p0", reservation=1 << 62, balancer="b0")
    dispatch = request.to_dispatch("e0", routed, Payload(handle=HANDLE))
    assert dispatch.prefix is planned.prefix
    for message in (dispatch, questions["m0"].message, answer):
        assert len(msgspec.msgpack.encode(message)) + 1024 <= MAX_MESSAGE_BYTES


class TestPeers:
    def seen(self, peers: Peers, role: Role, id: str, now_s: float = 0.0, incarnation: str = "a") -> bool:
        return peers.saw(msgspec.structs.replace(report(id, incarnation=incarnation), role=role), now_s)

    def test_replicas_are_asked_once_until_they_restart_or_did_not_answer(self) -> None:
        peers = Peers()
        assert self.seen(peers, Role.PREFILL, "p0") and not self.seen(peers, Role.PREFILL, "p0")
        peers.described("p0", None)
        assert peers.space(0.0) == "" and self.seen(peers, Role.PREFILL, "p0")
        peers.described("p0", "one")
        assert peers.space(0.0) == "one" and not self.seen(peers, Role.PREFILL, "p0")
        assert self.seen(peers, Role.PREFILL, "p0", incarnation="b")
        peers.described("p0", "two")
        assert peers.space(0.0) == "two"

    def test_the_space_is_that_of_most_and_outlives_them(self) -> None:
        peers = Peers()
        for id, space in (("p0", "one"), ("p1", "two"), ("p2", "two")):
            self.seen(peers, Role.PREFILL, id)
            peers.described(id, space)
        assert peers.space(0.0) == "two"
        peers.exited(ProcessExited(name="x", pid=1, members=["prefill/p1"]))
        assert peers.space(0.0) == "one"
        assert peers.space(EXPIRY_S) == "one"

    def test_a_silent_shard_is_nobody_until_it_reports_again(self) -> None:
        peers = Peers()
        for id in ("m1", "m0"):
            assert not self.seen(peers, Role.METADATA, id)
        assert peers.shards(0.0) == ["m0", "m1"]
        peers.silent(["m0", "m9"])
        assert peers.shards(0.0) == ["m1"]
        self.seen(peers, Role.METADATA, "m0")
        peers.exited(ProcessExited(name="x", pid=1, members=["metadata/m1", "prefill/p0"]))
        assert peers.shards(0.0) == ["m0"] and peers.shards(EXPIRY_S) == []


def test_one_shard_is_asked_for_everything_in_order() -> None:
    keys = b"".join(map(key, range(5)))
    assert scatter(keys, ["m0"])["m0"].message == FindBlocks(keys=keys)
    assert scatter(keys, []) == {} == scatter(b"", ["m0"])
