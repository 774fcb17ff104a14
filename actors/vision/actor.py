"""The vision replica: tells what an image is as a model input, and encodes images, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from opentelemetry import trace

from actors.rules.load import VisionLoad
from actors.vision.embeddings import Embeddings, Rows
from actors.vision.held import Held
from actors.vision.images import ImageError, Prepared, prepare
from actors.vision.queue import Asker, Job, Key, Queue, key_of
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import CANCEL_VISION, ENCODE_IMAGE, RELEASE_IMAGE, RELEASE_VISION, RESOLVE_IMAGE, Subject
from kernels.engine import Encoder
from kernels.vision_config import VisionConfig
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.message import Message, Role
from schemas.request import Cancel, CancelAcknowledged
from schemas.routing import LoadReported, Release
from schemas.vision import EncodeImage, Image, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

log = logging.getLogger("shoal.vision")
tracer = trace.get_tracer("shoal")

MAX_RESOLVING = 256
MAX_RESOLVING_BYTES = 512 * 1024 * 1024
"""Files that are being decoded, or wait for it, and all their bytes; more are refused."""

NUM_DECODING = 2
"""Images decoded at once: each takes a core, and the memory of its full size."""

MAX_FAULTS = 3
"""Images in a row at which the encoder fails: then it is the encoder, and the actor ends, to be started anew. Failing
is quick, so a replica that does nothing else would always have the least to do, and be given everything."""

LEASE_S = 120.0
"""How long pixels and embeddings are held for a request that nobody speaks of any more."""

PULL_S = 10.0


class Vision(Actor):
    """Images are decoded in threads, and encoded in the encoder's own; bad ones are refused, whatever is in them.

    What it holds for others, pixels and embeddings, it holds until it is told that they are of no use any more: so
    another replica can do again what a lost one did. Equal images are encoded once, for all who ask while they are
    waited for or remembered.
    """

    role = Role.VISION

    def __init__(self, id: str, bus: Bus, bulk: Bulk, encoder: Encoder, config: VisionConfig) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._encoder = encoder
        self._config = config
        self._queue = Queue()
        self._embeddings = Embeddings()
        self._held = Held()
        self._faults: set[Key] = set()
        self._envelopes: dict[Asker, Envelope] = {}
        self._num_resolving = 0
        self._resolving_bytes = 0
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

    @property
    def is_drained(self) -> bool:
        return super().is_drained and self._held.is_empty(self.now_s())

    def load(self) -> LoadReported:
        mine = {"held_bytes": float(self._held.num_bytes), "cached_bytes": float(self._embeddings.num_bytes)}
        left = VisionLoad(self._num_patches(self._queue.num_pixels))
        return structs.replace(
            super().load(),
            num_running=self._num_resolving,
            num_waiting=len(self._queue),
            reservations=self._queue.reservations,
            detail=left.detail() | mine,
        )

    # From the recipe

    async def _on_resolve(self, wanted: ResolveImage, envelope: Envelope) -> None:
        self._check_accepting()
        num_bytes = wanted.image.size_bytes
        if self._num_resolving >= MAX_RESOLVING or self._resolving_bytes + num_bytes > MAX_RESOLVING_BYTES:
            raise fail(Code.OVERLOADED, f"vision {self.id} has {self._num_resolving} images to decode: retry later")
        self._num_resolving += 1
        self._resolving_bytes += num_bytes
        self.spawn(self._resolve(wanted, envelope))

    async def _resolve(self, wanted: ResolveImage, envelope: Envelope) -> None:
        reply: Message
        with tracer.start_as_current_span("resolve image", context=envelope.context):
            try:
                reply = await self._resolved(wanted)
            except BusError as error:
                reply = _typed(error.failure)
            except Exception:
                reply = self._fault()
        self._num_resolving -= 1
        self._resolving_bytes -= wanted.image.size_bytes
        await envelope.answer(reply)

    async def _resolved(self, wanted: ResolveImage) -> ImageResolved:
        data = await self._bulk.unwrap(wanted.image, timeout_s=PULL_S)
        async with self._decoding:  # not while it is pulled: a file that never comes holds up no other
            if 0 < wanted.deadline_ns < self.bus.seams.clock_ns():
                raise fail(Code.DEADLINE_EXCEEDED, "nobody waits for it any more")
            try:
                prepared: Prepared = await self.bus.seams.run_beside(partial(prepare, data, self._config))
            except ImageError as error:
                raise fail(Code.BAD_REQUEST, str(error)) from None
        plan, pixels = prepared.plan, prepared.pixels.tobytes()
        return ImageResolved(
            vision=self.id,
            digest=prepared.digest,
            width=plan.width,
            height=plan.height,
            num_tokens=plan.num_tokens,
            pixels=self._hold(pixels, await self._bulk.checksum(pixels)),
            num_patches=self._num_patches(plan.width * plan.height),
        )

    # From the entrypoint

    async def _on_encode(self, asked: EncodeImage, envelope: Envelope) -> None:
        self._check_accepting()
        asker = Asker(asked)
        known = self._embeddings.get(key_of(asked.image))
        queued = None if known else self._queue.add(asker)
        if known is None and queued is None:
            raise fail(Code.OVERLOADED, f"vision {self.id} has {len(self._queue)} images to encode: retry later")
        self._envelopes[asker] = envelope
        if known is not None:
            await self._answer(asker, known)
        elif queued is not None and queued[1]:
            self.spawn(self._pull(queued[0]))

    async def _pull(self, job: Job) -> None:
        """The pixels, from wherever one who asks for them says that they are."""
        image, failure = job.image, Failure(code=Code.CANCELLED, message="nobody waits for it any more")
        while (asker := job.untried()) is not None:
            try:
                pixels = await self._bulk.pull(asker.asked.image.pixels, timeout_s=PULL_S)
            except BusError as error:
                asker.is_tried, failure = True, error.failure
                continue
            if 0 < len(pixels) == 3 * image.width * image.height:
                job.pixels = pixels
                self._has_work.set()
                return
            asker.is_tried = True
            message = f"{len(pixels)} bytes are no {image.width}×{image.height} pixels"
            failure = Failure(code=Code.BAD_REQUEST, message=message)
        for asker in self._queue.remove(job):
            await self._answer(asker, failure)

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        cancelled = self._queue.cancel(cancel.request_id)
        for asker in cancelled:
            await self._answer(asker, Failure(code=Code.CANCELLED, message="the request was cancelled"))
        return CancelAcknowledged(request_id=cancel.request_id, was_running=bool(cancelled))

    async def _on_release(self, release: ReleaseImage, envelope: Envelope) -> None:
        self._held.remove(release.held.key)
        self._bulk.withdraw(release.held)

    # Encoding

    async def _encode_loop(self) -> None:
        """The only caller of the encoder."""
        while True:
            await self._has_work.wait()
            for asker in self._queue.expire(self.bus.seams.clock_ns()):
                late = Failure(code=Code.DEADLINE_EXCEEDED, message="nobody waits for it any more")
                await self._answer(asker, late)
            job = self._queue.next()
            if job is None:
                self._has_work.clear()
                continue
            job.is_encoding = True
            with tracer.start_as_current_span("encode image", context=self._envelopes[job.askers[0]].context) as span:
                span.set_attributes({"shoal.replica": self.id, "shoal.image.askers": len(job.askers)})
                outcome = await self._encoded(job)
            for asker in self._queue.remove(job):
                await self._answer(asker, outcome)
            await self.report_load()  # what is left, before balancers choose by what was

    async def _encoded(self, job: Job) -> Rows | Failure:
        """What it gives, remembered; a fault of ours with one image does not end the others, until there are many."""
        pixels = np.frombuffer(job.pixels, dtype=np.uint8).reshape(job.image.height, job.image.width, 3)
        try:
            (data,) = await self._encoder.encode([pixels])
            rows = Rows(data, await self._bulk.checksum(data))
        except Exception:
            self._faults.add(key_of(job.image))
            if len(self._faults) == MAX_FAULTS:
                raise
            return self._fault()
        self._faults.clear()
        self._embeddings.add(key_of(job.image), rows)
        return rows

    async def _answer(self, asker: Asker, outcome: Rows | Failure) -> None:
        """Its request has all it gets: the embeddings on offer for it alone, or why not. Its reservation ends."""
        asked = asker.asked
        reply = _typed(outcome) if isinstance(outcome, Failure) else self._offered(asked.image, outcome)
        await self._envelopes.pop(asker).answer(reply)
        if asked.balancer:
            await self.bus.tell(RELEASE_VISION.at(asked.balancer), Release(reservation=asked.reservation))

    def _offered(self, image: Image, rows: Rows) -> ImageEncoded | Failure:
        if not rows.data or image.num_tokens < 1 or len(rows.data) % (4 * image.num_tokens):
            message = f"{len(rows.data)} bytes came out for {image.num_tokens} tokens"
            return Failure(code=Code.VISION_ERROR, message=message)
        try:
            return ImageEncoded(vision=self.id, embeddings=self._hold(rows.data, rows.checksum))
        except BusError as error:
            return error.failure

    # Small things

    def _check_accepting(self) -> None:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"vision {self.id} takes no more images")

    def _num_patches(self, num_pixels: int) -> int:
        return num_pixels // self._config.patch_size**2

    def _hold(self, data: bytes, checksum: int) -> Handle:
        """On offer to whoever needs it, under a lease. Raises `BusError(overloaded)`."""
        if not self._held.has_room(len(data), self.now_s()):
            raise fail(Code.OVERLOADED, f"vision {self.id} holds {self._held.num_bytes} bytes for others: retry later")
        handle = self._bulk.offer(data, lease_s=LEASE_S, checksum=checksum, is_shared=True)
        self._held.add(handle.key, len(data), self.now_s() + LEASE_S)
        return handle

    def _fault(self) -> Failure:
        """What the exception at hand is to a client."""
        log.exception("%s %s: an image failed", self.role, self.id)
        return Failure(code=Code.VISION_ERROR, message=f"vision {self.id} could not process the image")


def _typed(failure: Failure) -> Failure:
    """To a client it is the image that was lost, wherever its bytes were."""
    if failure.code is Code.TRANSFER_FAILED:
        log.warning("an image could not be pulled: %s", failure.message)
        return Failure(code=Code.VISION_ERROR, message="the image was lost on its way: send it again")
    return failure
