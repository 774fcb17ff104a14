"""The images a vision replica has taken on: encoded one at a time, in order of arrival, within bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.vision import EncodeImage

MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 512 * 1024 * 1024
"""Pixels of all of them: a hundred of the largest images the real model takes."""


@dataclass(slots=True, eq=False)
class Job:
    """One image to encode. `pixels` is empty until they have been pulled."""

    asked: EncodeImage
    pixels: bytes = b""

    @property
    def num_pixels(self) -> int:
        return self.asked.image.width * self.asked.image.height

    def is_expired(self, now_ns: int) -> bool:
        """Nobody waits for it any more."""
        return 0 < self.asked.deadline_ns < now_ns


class Queue:
    """Jobs from their arrival until their answer."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_pixels(self) -> int:
        """Of all jobs: what is left to do, the one being encoded included."""
        return sum(job.num_pixels for job in self._jobs)

    def add(self, job: Job) -> bool:
        """Take a job on. False if it is one too many."""
        held = sum(known.asked.image.pixels.size_bytes for known in self._jobs)
        if len(self._jobs) >= MAX_QUEUED or held + job.asked.image.pixels.size_bytes > MAX_QUEUED_BYTES:
            return False
        self._jobs[job] = None
        return True

    def next(self) -> Job | None:
        """The first job whose pixels are here: one that still pulls does not hold up the others."""
        return next((job for job in self._jobs if job.pixels), None)

    def remove(self, job: Job) -> None:
        """It is answered. Idempotent."""
        self._jobs.pop(job, None)

    def expire(self, now_ns: int) -> list[Job]:
        """Those nobody waits for any more. They are not here afterwards."""
        expired = [job for job in self._jobs if job.is_expired(now_ns)]
        for job in expired:
            del self._jobs[job]
        return expired

    def cancel(self, request_id: str) -> list[Job]:
        """The jobs of a request. They are not here afterwards, and what comes of one being encoded is dropped."""
        cancelled = [job for job in self._jobs if job.asked.request_id == request_id]
        for job in cancelled:
            del self._jobs[job]
        return cancelled
