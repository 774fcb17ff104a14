"""The vision replica: tells what an image is as a model input, and encodes images, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from opentelemetry import trace

from actors.vision.held import Held
from actors.vision.images import ImageError, Prepared, prepare
from actors.vision.queue import Job, Queue
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import CANCEL_VISION, ENCODE_IMAGE, RELEASE_IMAGE, RESOLVE_IMAGE, Subject
from kernels.engine import Encoder
from kernels.vision_config import VisionConfig
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.message import Message, Role
from schemas.request import Cancel, CancelAcknowledged
from schemas.routing import LoadReported
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

log = logging.getLogger("shoal.vision")
tracer = trace.get_tracer("shoal")

MAX_RESOLVING = 256
"""Images that are being decoded, or wait for it; more are refused."""

NUM_DECODING = 2
"""Images decoded at once: each takes a core, and the memory of its full size."""

LEASE_S = 120.0
"""How long pixels and embeddings are held for a request that nobody speaks of any more."""

PULL_S = 10.0


class Vision(Actor):
    """Images are decoded in threads, and encoded in the encoder's own; bad ones are refused, whatever is in them.

    What it holds for others, pixels and embeddings, it holds until it is told that they are of no use any more: so
    another replica can do again what a lost one did.
    """

    role = Role.VISION

    def __init__(self, id: str, bus: Bus, bulk: Bulk, encoder: Encoder, config: VisionConfig) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._encoder = encoder
        self._config = config
        self._queue = Queue()
        self._held = Held()
        self._envelopes: dict[Job, Envelope] = {}
        self._num_resolving = 0
        self._decoding = asyncio.Semaphore(NUM_DECODING)
        self._has_work = asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            RESOLVE_IMAGE: self._on_resolve,
            ENCODE_IMAGE: self._on_encode,
            RELEASE_IMAGE: self._on_release,
            CANCEL_VISION: self._on_cancel,
        }

    async def on_start(self) -> None:
        await self._encoder.start()
        self.spawn(self._encode_loop())

    async def on_stop(self) -> None:
        await self._encoder.close()

    def load(self) -> LoadReported:
        num_patches = self._queue.num_pixels // self._config.patch_size**2
        return structs.replace(
            super().load(),
            num_running=self._num_resolving,
            num_waiting=len(self._queue),
            detail={"num_patches": float(num_patches), "held_bytes": float(self._held.num_bytes)},
        )

    # From the recipe

    async def _on_resolve(self, wanted: ResolveImage, envelope: Envelope) -> None:
        self._check_accepting()
        if self._num_resolving >= MAX_RESOLVING:
            raise fail(Code.OVERLOADED, f"vision {self.id} has {self._num_resolving} images to decode: retry later")
        self._num_resolving += 1
        self.spawn(self._resolve(wanted, envelope))

    async def _resolve(self, wanted: ResolveImage, envelope: Envelope) -> None:
        with tracer.start_as_current_span("resolve image", context=envelope.context):
            await self._answer(envelope, self._resolved(wanted))
        self._num_resolving -= 1

    async def _resolved(self, wanted: ResolveImage) -> ImageResolved:
        async with self._decoding:
            if 0 < wanted.deadline_ns < self.bus.seams.clock_ns():
                raise fail(Code.DEADLINE_EXCEEDED, "nobody waits for it any more")
            data = await self._bulk.unwrap(wanted.image, timeout_s=PULL_S)
            try:
                prepared: Prepared = await self.bus.seams.run_beside(partial(prepare, data, self._config))
            except ImageError as error:
                raise fail(Code.BAD_REQUEST, str(error)) from None
        return ImageResolved(
            vision=self.id,
            digest=prepared.digest,
            width=prepared.plan.width,
            height=prepared.plan.height,
            num_tokens=prepared.plan.num_tokens,
            pixels=await self._hold(prepared.pixels.tobytes()),
        )

    # From the entrypoint

    async def _on_encode(self, asked: EncodeImage, envelope: Envelope) -> None:
        self._check_accepting()
        job = Job(asked)
        if not self._queue.add(job):
            raise fail(Code.OVERLOADED, f"vision {self.id} has {len(self._queue)} images to encode: retry later")
        self._envelopes[job] = envelope
        self.spawn(self._pull(job))

    async def _pull(self, job: Job) -> None:
        image = job.asked.image
        try:
            pixels = await self._bulk.pull(image.pixels, timeout_s=PULL_S)
            if len(pixels) != 3 * image.width * image.height:
                raise fail(Code.BAD_REQUEST, f"{len(pixels)} bytes are no {image.width}×{image.height} pixels")
        except BusError as error:
            await self._leave(job, error.failure)
            return
        job.pixels = pixels
        self._has_work.set()

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        cancelled = self._queue.cancel(cancel.request_id)
        for job in cancelled:
            await self._leave(job, Failure(code=Code.CANCELLED, message="the request was cancelled"))
        return CancelAcknowledged(request_id=cancel.request_id, was_running=bool(cancelled))

    async def _on_release(self, release: ReleaseImage, envelope: Envelope) -> None:
        self._held.remove(release.held.key)
        self._bulk.withdraw(release.held)

    # Encoding

    async def _encode_loop(self) -> None:
        """The only caller of the encoder."""
        while True:
            await self._has_work.wait()
            for job in self._queue.expire(self.bus.seams.clock_ns()):
                await self._leave(job, Failure(code=Code.DEADLINE_EXCEEDED, message="nobody waits for it any more"))
            job_or_none = self._queue.next()
            if job_or_none is None:
                self._has_work.clear()
                continue
            job = job_or_none
            envelope = self._envelopes[job]
            with tracer.start_as_current_span("encode image", context=envelope.context) as span:
                span.set_attribute("shoal.replica", self.id)
                await self._answer(envelope, self._encoded(job))
            self._queue.remove(job)
            self._envelopes.pop(job, None)

    async def _encoded(self, job: Job) -> ImageEncoded:
        image = job.asked.image
        pixels = np.frombuffer(job.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)
        (rows,) = await self._encoder.encode([pixels])
        if job not in self._envelopes:
            raise fail(Code.CANCELLED, "the request was cancelled")
        if not rows or len(rows) % (4 * image.num_tokens):
            raise fail(Code.VISION_ERROR, f"{len(rows)} bytes came out for {image.num_tokens} tokens")
        return ImageEncoded(vision=self.id, embeddings=await self._hold(rows))

    # Small things

    def _check_accepting(self) -> None:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"vision {self.id} takes no more images")

    async def _hold(self, data: bytes) -> Handle:
        """On offer to whoever needs it, under a lease. Raises `BusError(overloaded)`."""
        if not self._held.has_room(len(data), self.now_s()):
            raise fail(Code.OVERLOADED, f"vision {self.id} holds {self._held.num_bytes} bytes for others: retry later")
        checksum = await self._bulk.checksum(data)
        handle = self._bulk.offer(data, lease_s=LEASE_S, checksum=checksum, is_shared=True)
        self._held.add(handle.key, len(data), self.now_s() + LEASE_S)
        return handle

    async def _answer(self, envelope: Envelope, work: Coroutine[Any, Any, Message]) -> None:
        """What the work gives, or why it gives nothing. A fault of ours with one image does not end the others."""
        reply: Message
        try:
            reply = await work
        except BusError as error:
            reply = error.failure
        except Exception:
            log.exception("%s %s: an image failed", self.role, self.id)
            reply = Failure(code=Code.VISION_ERROR, message=f"vision {self.id} could not process the image")
        await envelope.answer(_typed(reply))

    async def _leave(self, job: Job, failure: Failure) -> None:
        """The job is over before it was encoded."""
        self._queue.remove(job)
        envelope = self._envelopes.pop(job, None)
        if envelope is not None:
            await envelope.answer(_typed(failure))


def _typed(reply: Message) -> Message:
    """To a client it is the image that was lost, wherever its bytes were."""
    if isinstance(reply, Failure) and reply.code is Code.TRANSFER_FAILED:
        log.warning("an image could not be pulled: %s", reply.message)
        return Failure(code=Code.VISION_ERROR, message="the image was lost on its way: send it again")
    return reply
