"""The requests of one prefill replica: which to load, to admit, to compute next, and how much is left of all."""

from __future__ import annotations

from collections.abc import Iterator

from actors.prefill.job import Job, Loading
from actors.prefill.order import Turns, Waiting
from actors.prefill.packing import Packing
from actors.rules.cost import STEP_NS
from actors.rules.load import PrefillLoad
from actors.rules.meter import Meter
from kernels.engine import Admission, Chunk, Engine, Sampling

LONG_NS = 8 * STEP_NS
"""A request with so much work is long: more than seven steps of its own."""

MOST_REFUSED = 4
"""So many requests for which the engine has no room now are asked for in a row, and no more."""

MOST_PASSED = 32
"""So many shorter requests may be given a slot before one that came earlier and has no room now; then all wait."""


class Batch:
    """The queue and the running set of one replica. What loads delays nobody, and has its place when it is loaded."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.num_computed = 0  # tokens
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, tuple[Job, bool]] = {}  # whether it was long, too
        self._turns = Turns()
        self._waiting = Waiting(self._turns)
        self._packing = Packing(self._turns)
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def add(self, job: Job) -> None:
        """Queue a job. Raises ValueError if one with its id is here."""
        if job.id in self._jobs:
            raise ValueError(f"request {job.id} is here already")
        self._num_added += 1
        job.number = self._num_added
        self._jobs[job.id] = job
        self._turns.join(job.tenant)
        if job.loading is Loading.NONE:
            self.loaded(job)

    def loaded(self, job: Job) -> None:
        """There is nothing to load for it any more: it may have a slot."""
        self._waiting.push(job, is_long=job.left_ns(self.meter.cost) >= LONG_NS)

    def remove(self, job: Job) -> None:
        """The job is computed, cancelled or failed. Idempotent."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
            self._running.pop(job.id, None)
            self._waiting.remove(job)
            self._turns.leave(job.tenant)

    def to_load(self, max_bytes: int) -> list[Job]:
        """The jobs that are to be loaded from now on, in order: together with all that are, and wait for the engine,
        they hold at most `max_bytes`; but one alone may hold more."""
        chosen = []
        num_bytes = self.num_load_bytes
        for job in self._jobs.values():
            if job.loading is not Loading.WAITING:
                continue
            if num_bytes and num_bytes + job.num_load_bytes > max_bytes:
                break
            num_bytes += job.num_load_bytes
            job.loading = Loading.RUNNING
            chosen.append(job)
        return chosen

    def admit(self, engine: Engine, num_leaving: int) -> tuple[list[Job], list[Job]]:
        """Give engine slots to waiting jobs: those admitted, and those that can never be (they stay, without a turn).

        With the `num_leaving` that are computed and wait for decode, they are twice as many as there are slots at most:
        when decode is full, one comes for one that goes, and whose turn it is does not wait behind a whole set.

        Long ones have at most half of the slots, so that there are some that are free soon. For which the engine has no
        room now, others may pass: MOST_PASSED at most before the one that came first, then it has the next room.
        """
        admitted: list[Job] = []
        hopeless: list[Job] = []
        refused: list[tuple[Job, bool]] = []
        num_slots = engine.info.num_slots
        num_free = min(num_slots, 2 * num_slots - num_leaving)
        while len(self._running) < num_free and len(refused) < MOST_REFUSED:
            oldest = self._waiting.oldest()
            num_long = sum(is_long for _, is_long in self._running.values())
            chosen: tuple[Job, bool] | None
            if oldest is not None and oldest.num_passed >= MOST_PASSED:
                chosen = self._waiting.pop_oldest()
            else:
                chosen = self._waiting.pop(may_be_long=num_long < max(1, num_slots // 2))
            if chosen is None:
                break
            job, is_long = chosen
            admission = _admit(engine, job)
            if admission is Admission.OK:
                job.is_admitted = True
                self._running[job.id] = job, is_long
                admitted.append(job)
                for other, _ in refused:
                    other.num_passed += 1
            elif admission is Admission.NEVER:
                hopeless.append(job)
            else:
                refused.append(chosen)
                if job.num_passed >= MOST_PASSED:
                    break
        for job, is_long in refused:
            self._waiting.push(job, is_long=is_long)
        return admitted, hopeless

    def next_step(self, max_tokens: int) -> list[tuple[Job, Chunk]]:
        """The chunks of one step (`Packing`), at most `max_tokens` together."""
        running = sorted((job for job, _ in self._running.values()), key=lambda job: job.number)
        step = self._packing.next_step(running, self.meter.cost, max_tokens)
        return [(job, Chunk(job.id, job.tokens[job.num_done : job.num_done + num])) for job, num in step]

    def detail(self, now_s: float) -> dict[str, float]:
        """For a load report: tokens computed since the start, what is left to do by tenant, what work costs, how far
        off that is, and how long the one that came first of those without a slot has waited."""
        cost, remaining = self.meter.cost, dict[str, float]()
        for job in self._jobs.values():
            remaining[job.tenant] = remaining.get(job.tenant, 0.0) + job.left_ns(cost)
        waiting = (now_s - job.arrived_s for job in self._jobs.values() if not job.is_admitted)
        return {
            "computed_tokens": float(self.num_computed),
            "queue_age_s": next(waiting, 0.0),
            "cost_residual": self.meter.residual,
            **PrefillLoad(remaining, cost).detail(),
        }

    @property
    def num_running(self) -> int:
        """Those with a slot."""
        return len(self._running)

    @property
    def num_image_bytes(self) -> int:
        """Held for its images."""
        return sum(len(image.embeddings) for job in self._jobs.values() for image in job.images)

    @property
    def num_load_bytes(self) -> int:
        """Held, or soon to be, for what is loading or loaded."""
        loaded = (Loading.RUNNING, Loading.DONE)
        return sum(job.num_load_bytes for job in self._jobs.values() if job.loading in loaded)

    @property
    def num_tokens_left(self) -> int:
        return sum(job.num_left for job in self._jobs.values())


def _admit(engine: Engine, job: Job) -> Admission:
    sampling = job.dispatch.sampling
    wanted = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
    bounded = 0 if job.dispatch.exact else job.num_bounded
    return engine.admit(job.id, len(job.tokens), wanted, bounded_prompt=bounded)
