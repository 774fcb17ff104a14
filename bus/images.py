"""Images on their way through vision replicas: asked after, encoded and let go, by any replica that is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import CANCEL_VISION, ENCODE_IMAGE, RELEASE_IMAGE, RESOLVE_IMAGE, Subject
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

M = TypeVar("M", ResolveImage, EncodeImage)
R = TypeVar("R")

TRY_S = 30.0
TRIES = 3
"""How long one replica may take, its queue included, and how many may be silent: questions and answers can be lost. No
question outlives its try, so asking again adds nothing to a queue."""

MAX_LOSSES = 2
"""How many replicas may end meanwhile: by the second it may be the image that ends them."""

AT_ONCE = 2
"""How many images of one request are looked at at a time: between them others have their turn."""

PATIENCE_S = 20.0
"""How long to wait for a replica to be there, or to have room: one restarts within this time."""

PAUSE_S = 0.1
AGAIN = frozenset({Code.NO_RESPONDERS, Code.OVERLOADED, Code.SHUTTING_DOWN})
"""Another replica, or the same one a little later, may do it."""


class AnyVision:
    """Whoever of the vision replicas is there. What one may have been at when it ended is asked anew, once."""

    def __init__(self, bus: Bus, bulk: Bulk) -> None:
        self._bus = bus
        self._bulk = bulk
        self._loss = asyncio.Event()

    def on_exited(self, exited: ProcessExited) -> None:
        """To be told of every process that ended: nobody else says that there will be no answer."""
        if exited.ids(Role.VISION):
            self._loss.set()
            self._loss = asyncio.Event()

    async def resolve(
        self, files: Sequence[bytes], deadline_ns: int, is_over: Callable[[], bool]
    ) -> list[ImageResolved | Failure]:
        """What these files are as images, or why they are none; AT_ONCE of them are asked after at a time.

        `deadline_ns` is unix time, 0 for none. Once `is_over` nothing is asked any more.
        """
        turn = asyncio.Semaphore(AT_ONCE)

        async def resolve(file: bytes) -> ImageResolved | Failure:
            async with turn:
                try:
                    image = await self._bulk.wrap(file, is_shared=True)
                    try:
                        wanted = ResolveImage(image=image, deadline_ns=deadline_ns)
                        return await self._ask(RESOLVE_IMAGE, wanted, is_over)
                    finally:
                        if image.handle is not None:
                            self._bulk.withdraw(image.handle)
                except BusError as error:
                    return error.failure

        return await asyncio.gather(*map(resolve, files))

    async def encode(self, wanted: Sequence[EncodeImage], is_over: Callable[[], bool]) -> list[ImageEncoded]:
        """The embeddings of these images of one request, all asked for at once. Once `is_over` nothing is asked anew.

        Raises the first `BusError`: no_replica, overloaded, deadline_exceeded or vision_error. Then none is held for
        us, and the others need not be encoded any more.
        """
        tasks = [asyncio.create_task(self._ask(ENCODE_IMAGE, one, is_over)) for one in wanted]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            ended = [task for task in tasks if task.done() and not task.cancelled()]
            made = [task.result() for task in ended if task.exception() is None]
            await self.cancel(wanted[0].request_id)
            await self.release([(image.vision, image.embeddings) for image in made])
            if isinstance(error, BusError):
                raise _typed(error) from None
            raise

    async def cancel(self, request_id: str) -> None:
        """Whoever is at images of this request, nobody waits for them any more."""
        await self._bus.tell(CANCEL_VISION.all(), Cancel(request_id=request_id))

    async def release(self, held: Iterable[tuple[str, Handle]]) -> None:
        """Tell the replicas that hold these, as (replica, handle), that nobody needs them any more."""
        for vision, handle in held:
            await self._bus.tell(RELEASE_IMAGE.at(vision), ReleaseImage(held=handle))

    async def _ask(self, subject: Subject[M, R], wanted: M, is_over: Callable[[], bool]) -> R:
        """As `_ask_patiently`, begun anew when a replica ended. Raises vision_error when that is over, too."""
        for _ in range(MAX_LOSSES):
            asking = asyncio.create_task(self._ask_patiently(subject, wanted, is_over))
            losing = asyncio.create_task(self._loss.wait())
            try:
                await asyncio.wait([asking, losing], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            finally:
                asking.cancel()
                losing.cancel()
        raise fail(Code.VISION_ERROR, f"the image was given to {MAX_LOSSES} vision replicas that were lost")

    async def _ask_patiently(self, subject: Subject[M, R], wanted: M, is_over: Callable[[], bool]) -> R:
        """The answer of one of them. While nobody is there, or has room, or answers, they are asked again.

        Raises the last `BusError` when patience is over, any that asking again cannot mend at once, deadline_exceeded,
        and cancelled once `is_over`.
        """
        loop = asyncio.get_running_loop()
        give_up_s, num_silences = loop.time() + PATIENCE_S, 0
        while not is_over():
            now_ns = self._bus.seams.clock_ns()
            until_ns = min(now_ns + int(TRY_S * 1e9), wanted.deadline_ns or sys.maxsize)
            message = structs.replace(wanted, deadline_ns=until_ns)
            try:
                return await self._bus.ask(subject.any(), message, timeout_s=max(0, until_ns - now_ns) / 1e9)
            except BusError as error:
                is_silence = error.code is Code.DEADLINE_EXCEEDED
                num_silences += is_silence
                can_mend = num_silences < TRIES if is_silence else error.code in AGAIN and loop.time() < give_up_s
                if 0 < wanted.deadline_ns <= self._bus.seams.clock_ns():
                    raise fail(Code.DEADLINE_EXCEEDED, "the deadline of the request has passed") from None
                if not can_mend:
                    raise
            await asyncio.sleep(PAUSE_S)
        raise fail(Code.CANCELLED, "nobody waits for it any more")


def _typed(error: BusError) -> BusError:
    """What it means to a client, whose image is good."""
    if error.code in (Code.NO_RESPONDERS, Code.SHUTTING_DOWN):
        return fail(Code.NO_REPLICA, "no vision replica is there to encode the image")
    if error.code in (Code.OVERLOADED, Code.DEADLINE_EXCEEDED):
        return error
    return fail(Code.VISION_ERROR, error.failure.message)
