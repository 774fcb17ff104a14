"""What a prefill replica computes next."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from actors.prefill.batch import Batch
from actors.prefill.job import Job
from actors.prefill.keeping import Keeping
from actors.prefill.packing import CHUNK_GRAIN
from actors.rules.hit import EXACT_OUTPUT
from actors.rules.meter import Meter
from kernels.engine import Admission, Sampling
from kernels.timed import TimedEngine
from schemas.bulk import Handle
from schemas.cache import CachedPrefix
from schemas.request import Limits
from schemas.routing import Routed
from tests.actors.builders import dispatch
from tests.actors.core import VOCABULARY, info

HANDLE = Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0)


def job(id: str, num_tokens: int) -> Job:
    return Job(dispatch(id, num_tokens), np.arange(num_tokens, dtype=np.uint32))


def batch_of(*jobs: Job, num_slots: int = 4) -> Batch:
    """With the jobs that there are slots for admitted."""
    batch = Batch(Meter())
    for each in jobs:
        batch.add(each)
    batch.admit(TimedEngine(info(num_slots=num_slots, max_tokens=4096), VOCABULARY), 0)
    return batch


def sizes(batch: Batch, max_tokens: int) -> list[tuple[str, int]]:
    return [(job.id, len(chunk.tokens)) for job, chunk in batch.next_step(max_tokens)]


class TestBatch:
    def test_short_ones_first_come_first_served_and_the_last_one_cut_at_the_grain(self) -> None:
        batch = batch_of(job("a", 100), job("b", 1000), job("c", 10))
        assert sizes(batch, 512) == [("a", 100), ("b", 128)], "no more beside one that ends"

    def test_cuts_fall_on_multiples_of_the_grain_of_the_prompt(self) -> None:
        batch = batch_of(job("a", 1000))
        cuts, done = [], 0
        while step := batch.next_step(300):
            ((chosen, chunk),) = step
            assert chunk.tokens[0] == done
            done += len(chunk.tokens)
            chosen.num_done = done
            cuts.append(done)
        assert cuts == [256, 512, 768, 1000]

    def test_a_budget_below_the_grain_still_makes_progress(self) -> None:
        batch = batch_of(job("a", 1000))
        assert sizes(batch, 5) == [("a", CHUNK_GRAIN)]

    def test_beside_a_prompt_that_is_cut_for_its_windows_others_get_their_turn(self) -> None:
        first, *_ = jobs = job("a", 1000), job("b", 1000), job("c", 100)
        batch = batch_of(*jobs)
        for each in jobs:
            keys = bytes(each.num_left // 128 * 16)
            each.keeping = Keeping(CachedPrefix(space="", root=bytes(16), keys=keys), each.tokens, branches=[300])
        assert sizes(batch, 4096) == [("a", 256), ("b", 256), ("c", 100)]
        assert sizes(batch, 400) == [("a", 256), ("b", 128)]
        assert sizes(batch, 200) == [("a", 128)]
        first.num_done = 256
        assert sizes(batch, 4096) == [("a", 744), ("b", 256), ("c", 100)]

    def test_waiting_jobs_are_not_computed(self) -> None:
        batch = batch_of(job("a", 10), job("b", 10), num_slots=1)
        assert sizes(batch, 512) == [("a", 10)]

    def test_one_job_per_request(self) -> None:
        batch = Batch(Meter())
        batch.add(job("a", 1))
        with pytest.raises(ValueError):
            batch.add(job("a", 1))

    def test_remove_is_idempotent_and_by_identity(self) -> None:
        batch = Batch(Meter())
        first, second = job("a", 1), job("a", 1)
        batch.add(first)
        batch.remove(second)
        assert len(batch) == 1
        batch.remove(first)
        batch.remove(first)
        assert len(batch) == 0


class Admitting(TimedEngine):
    """Notes what was asked of it."""

    def __init__(self) -> None:
        super().__init__(info(), VOCABULARY)
        self.bounded: dict[str, int] = {}

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        self.bounded[key] = bounded_prompt
        return super().admit(key, num_tokens, sampling, bounded_prompt=bounded_prompt)


def test_prompts_are_bounded_unless_the_request_is_exact() -> None:
    engine, batch = Admitting(), Batch(Meter())
    batch.add(job("usual", 300))
    exact = job("exact", 300)
    exact.dispatch = structs.replace(exact.dispatch, exact=True)
    batch.add(exact)
    admitted, hopeless = batch.admit(engine, 0)
    assert [each.id for each in admitted] == ["usual", "exact"] and not hopeless
    assert engine.bounded == {"usual": 300, "exact": 0}


def test_output_behind_a_prompt_is_computed_as_it_was_and_much_of_it_as_a_prompt() -> None:
    engine, batch = Admitting(), Batch(Meter())
    for num_output in (40, EXACT_OUTPUT, EXACT_OUTPUT + 1):
        rebuilt = job(str(num_output), 1500)
        limits = Limits(max_tokens=2000)
        rebuilt.dispatch = structs.replace(rebuilt.dispatch, num_output=num_output, limits=limits, is_protected=True)
        batch.add(rebuilt)
        assert rebuilt.route().num_new == 2000 - num_output and rebuilt.route().is_whole
        offer = rebuilt.hand_over(Routed(replica="d0", reservation=1, balancer="db0"), HANDLE, "timed")
        assert (offer.num_tokens, offer.num_output, offer.is_protected) == (1500, num_output, True)
        decoded = 128 if num_output > EXACT_OUTPUT else 128 + num_output  # by all layers
        assert rebuilt.chunk(1500).tail_tokens == decoded
    batch.admit(engine, 0)
    assert engine.bounded == {"40": 1460, str(EXACT_OUTPUT): 1500 - EXACT_OUTPUT, str(EXACT_OUTPUT + 1): 1500}
