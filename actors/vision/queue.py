"""The images a vision replica has taken on: encoded one at a time, in order of arrival, within bounded memory.

Who asks for an image that is here already, by its digest, waits for the same encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from schemas.vision import EncodeImage, Image

MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 512 * 1024 * 1024
"""Requests that wait, and the pixels of all images: a hundred of the largest the real model takes."""

Key = tuple[str, int, int]


def key_of(image: Image) -> Key:
    """What says that two images are the same. The digest alone would, were it never claimed of other pixels."""
    return image.digest, image.width, image.height


@dataclass(slots=True, eq=False)
class Asker:
    """A request that waits for an image. `is_tried`: the pixels that it pointed to could not be had."""

    asked: EncodeImage
    is_tried: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """One image to encode. `pixels` is empty until they have been pulled, from where any of its askers says.

    It goes on, once it is being encoded, when nobody waits for it any more: the next one who asks is served by that.
    """

    image: Image
    askers: list[Asker] = field(default_factory=list)
    pixels: bytes = b""
    is_encoding: bool = False

    def untried(self) -> Asker | None:
        """Whose pixels to pull next."""
        return next((asker for asker in self.askers if not asker.is_tried), None)


class Queue:
    """Jobs from their arrival until they are encoded."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Job] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(job.askers) for job in self._jobs.values())

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def num_pixels(self) -> int:
        """Of all images: what is left to do, the one being encoded included."""
        return sum(job.image.width * job.image.height for job in self)

    @property
    def reservations(self) -> list[int]:
        """Of those who wait."""
        return [asker.asked.reservation for job in self for asker in job.askers if asker.asked.balancer]

    def add(self, asker: Asker) -> tuple[Job, bool] | None:
        """The job that a request waits for from now on, and whether it is a new one. None if that is one too many."""
        image = asker.asked.image
        if len(self) >= MAX_QUEUED:
            return None
        job = self._jobs.get(key_of(image))
        is_new = job is None
        if job is None:
            if sum(known.image.pixels.size_bytes for known in self) + image.pixels.size_bytes > MAX_QUEUED_BYTES:
                return None
            job = self._jobs[key_of(image)] = Job(image)
        job.askers.append(asker)
        return job, is_new

    def next(self) -> Job | None:
        """The first job whose pixels are here: one that still pulls does not hold up the others."""
        return next((job for job in self if job.pixels), None)

    def remove(self, job: Job) -> list[Asker]:
        """It is over. Who waited for it."""
        if self._jobs.get(key_of(job.image)) is job:
            del self._jobs[key_of(job.image)]
        askers, job.askers = job.askers, []
        return askers

    def expire(self, now_ns: int) -> list[Asker]:
        """Those who wait no more. They are not here afterwards."""
        return self._take(lambda asked: 0 < asked.deadline_ns < now_ns)

    def cancel(self, request_id: str) -> list[Asker]:
        """All that this request waits for. It is not here afterwards."""
        return self._take(lambda asked: asked.request_id == request_id)

    def _take(self, is_over: Callable[[EncodeImage], bool]) -> list[Asker]:
        taken = []
        for key, job in list(self._jobs.items()):
            over = [asker for asker in job.askers if is_over(asker.asked)]
            job.askers = [asker for asker in job.askers if asker not in over]
            taken += over
            if not job.askers and not job.is_encoding:
                del self._jobs[key]
        return taken
