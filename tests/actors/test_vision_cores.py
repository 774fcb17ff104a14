"""What a vision replica has to do and what it remembers, and which replica is given an image: the pure parts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from actors.balancers import vision as policy
from actors.balancers.ledger import Ledger
from actors.balancers.vision import FewestPatches
from actors.rules.load import VisionLoad
from actors.vision import embeddings, queue
from actors.vision.embeddings import Embeddings, Rows
from actors.vision.queue import Asker, Job, Queue
from schemas.bulk import Handle
from schemas.message import Role
from schemas.routing import Route
from schemas.vision import EncodeImage, Image
from tests.actors.builders import report


def asker(request_id: str = "r", digest: str = "d", size_bytes: int = 12, **fields: Any) -> Asker:
    pixels = Handle(address="mem://x", key="k", generation=1, size_bytes=size_bytes, checksum=0)
    image = Image(start=0, num_tokens=4, digest=digest, width=2, height=2, vision="v", pixels=pixels)
    return Asker(EncodeImage(request_id=request_id, image=image, **fields))


def add(jobs: Queue, one: Asker) -> Job:
    added = jobs.add(one)
    assert added is not None
    return added[0]


# The queue


def test_a_job_that_still_pulls_does_not_hold_up_the_others() -> None:
    jobs = Queue()
    first, second = add(jobs, asker("a", "1")), add(jobs, asker("b", "2"))
    assert jobs.next() is None
    second.pixels = b"x"
    assert jobs.next() is second
    first.pixels = b"x"
    assert jobs.next() is first
    assert jobs.num_pixels == 8
    assert [one.asked.request_id for one in jobs.remove(first)] == ["a"]
    assert jobs.remove(first) == []
    assert jobs.next() is second and len(jobs) == 1


def test_the_queue_is_bounded_and_forgets_the_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Queue()
    add(jobs, asker("a", "1", queue.MAX_QUEUED_BYTES - 1, deadline_ns=5))
    assert jobs.add(asker("b", "2", 2)) is None
    assert jobs.expire(5) == [] and [late.asked.request_id for late in jobs.expire(6)] == ["a"]
    add(jobs, asker("b", "2", 2))
    monkeypatch.setattr(queue, "MAX_QUEUED", 1)
    assert jobs.add(asker("c", "2", 2)) is None and len(jobs) == 1  # also of those who wait for the same


def test_equal_images_are_one_job_that_lives_as_long_as_somebody_waits() -> None:
    jobs = Queue()
    askers = [asker(id, reservation=i, balancer="vb") for i, id in enumerate("abc")]
    assert [jobs.add(one) for one in askers] == [(job := next(iter(jobs)), True), (job, False), (job, False)]
    assert (len(jobs), jobs.num_pixels, jobs.reservations) == (3, 4, [0, 1, 2])
    assert jobs.cancel("a") == askers[:1] and job.untried() is askers[1]
    askers[1].is_tried = True
    assert job.untried() is askers[2]
    assert jobs.cancel("b") == askers[1:2] and len(jobs) == 1
    assert jobs.cancel("c") == askers[2:] and list(jobs) == []
    # What is gone is not what came after it under the same name.
    after = add(jobs, asker("d"))
    assert after is not job and jobs.remove(job) == [] and list(jobs) == [after]


def test_what_is_being_encoded_is_there_for_the_next() -> None:
    jobs = Queue()
    job = add(jobs, asker("a"))
    job.pixels, job.is_encoding = b"x", True
    assert len(jobs.cancel("a")) == 1 and len(jobs) == 0 and jobs.num_pixels == 4
    assert jobs.add(asker("b")) == (job, False)
    assert [one.asked.request_id for one in jobs.remove(job)] == ["b"]


# What is remembered


def test_embeddings_are_bounded_and_the_least_lately_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_CACHED_BYTES", 10)
    cache, keys = Embeddings(), [(name, 2, 2) for name in "abcd"]
    for key in keys[:2]:
        cache.add(key, Rows(b"12345", 0))
    assert cache.get(keys[0]) == Rows(b"12345", 0)
    cache.add(keys[2], Rows(b"1234", 0))
    assert cache.get(keys[1]) is None and cache.get(keys[0]) is not None and cache.num_bytes == 9
    cache.add(keys[3], Rows(b"1" * 11, 0))
    assert cache.get(keys[3]) is None and cache.num_bytes == 9


# Who is given an image


class Pool:
    """A ledger of vision replicas, and the policy that chooses among them."""

    def __init__(self) -> None:
        self.ledger, self.choose, self.num_routed, self.seq = Ledger(), FewestPatches(), 0, 0

    def report(self, id: str, num_patches: float, held: list[int] | None = None, incarnation: str = "a") -> None:
        self.seq += 1
        said = report(id, seq=self.seq, incarnation=incarnation, reservations=held)
        detail = VisionLoad(num_patches).detail()
        self.ledger.report(structs.replace(said, role=Role.VISION, detail=detail), 0.0)

    def route(self, digest: str, num_new: int, *excluded: str) -> str:
        self.num_routed += 1
        route = Route(request_id="r", num_new=num_new, digest=digest, excluded=list(excluded))
        chosen = self.choose(self.ledger.eligible(excluded, 0.0), route, 0.0, 0)
        self.ledger.reserve(self.num_routed, chosen, route, 0.0)
        return chosen.id


def test_patches_count_not_images() -> None:
    pool = Pool()
    pool.report("v0", 100)
    pool.report("v1", 0)
    assert [pool.route(f"small {i}", 30) for i in range(4)] == ["v1"] * 4
    assert pool.route("large", 500) == "v0"
    assert pool.route("next", 1) == "v1"
    pool.report("v1", 121, [1, 2, 3, 4, 6])  # now it says itself what was on the way
    assert pool.route("last", 1) == "v1"


def test_a_replica_that_was_given_the_same_image_is_asked_again_when_that_is_sooner() -> None:
    pool = Pool()
    pool.report("v0", 0)
    pool.report("v1", 0)
    assert pool.route("a", 50) == "v0"
    assert pool.route("b", 60) == "v1"
    assert pool.route("b", 60) == "v1"  # 60 that are on the way, once, against 50 + 60
    assert pool.route("c", 20) == "v0"
    pool.report("v0", 0, incarnation="b")
    assert pool.route("a", 30) == "v0"  # it was restarted, but has nothing to do
    pool.report("v0", 200)
    pool.report("v1", 0, incarnation="b")
    assert pool.route("a", 30) == "v1"  # to encode it again is sooner


def test_who_did_not_take_an_image_does_not_have_it() -> None:
    pool = Pool()
    for id in ("v0", "v1", "v2"):
        pool.report(id, 0)
    assert (pool.route("a", 50), pool.route("a", 50, "v0")) == ("v0", "v1")
    for id in ("v0", "v1", "v2"):
        pool.report(id, 0, [1, 2])
    assert pool.route("a", 50) == "v1"


def test_what_is_remembered_of_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_REMEMBERED", 3)
    pool = Pool()
    pool.report("v0", 0)
    for i in range(9):
        pool.route(f"{i}", 1)
    assert len(pool.choose._given) == 3
