"""Images on their way through vision replicas: asked after, encoded and let go, by any replica that is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import ENCODE_IMAGE, RELEASE_IMAGE, RESOLVE_IMAGE, Subject
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

M = TypeVar("M", ResolveImage, EncodeImage)
R = TypeVar("R")

TRY_S = 30.0
TRIES = 3
"""How long one replica may take, its queue included, and how many may be silent: questions and answers can be lost. No
question outlives its try, so asking again adds nothing to a queue."""

PATIENCE_S = 20.0
"""How long to wait for a replica to be there, or to have room: one restarts within this time."""

PAUSE_S = 0.1
AGAIN = frozenset({Code.NO_RESPONDERS, Code.OVERLOADED, Code.SHUTTING_DOWN})
"""Another replica, or the same one a little later, may do it."""


async def resolve_images(
    bus: Bus, bulk: Bulk, files: Sequence[bytes], tenant: str, deadline_ns: int
) -> list[ImageResolved | Failure]:
    """What these files are as images, or why they are none; all are asked after at once. `deadline_ns` is unix time, 0
    for none.
    """

    async def resolve(file: bytes) -> ImageResolved | Failure:
        try:
            image = await bulk.wrap(file, is_shared=True)
            try:
                wanted = ResolveImage(image=image, tenant=tenant, deadline_ns=deadline_ns)
                return await _ask_any(bus, RESOLVE_IMAGE, wanted)
            finally:
                if image.handle is not None:
                    bulk.withdraw(image.handle)
        except BusError as error:
            return error.failure

    return await asyncio.gather(*map(resolve, files))


async def encode_images(
    bus: Bus, wanted: Sequence[EncodeImage], loss: Callable[[], asyncio.Event], is_over: Callable[[], bool]
) -> list[ImageEncoded]:
    """The embeddings of these images, all asked for at once, and anew when `loss`, the event to wait for now, says that
    a replica has ended: it may be the one that was at it. Once `is_over` nothing is asked anew.

    Raises the first `BusError`: no_replica, overloaded, deadline_exceeded or vision_error. Then none is held for us.
    """
    tasks = [asyncio.create_task(_encode(bus, one, loss, is_over)) for one in wanted]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        made = [task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
        await release_images(bus, [(image.vision, image.embeddings) for image in made])
        raise


async def _encode(
    bus: Bus, wanted: EncodeImage, loss: Callable[[], asyncio.Event], is_over: Callable[[], bool]
) -> ImageEncoded:
    while True:
        asking = asyncio.create_task(_ask_any(bus, ENCODE_IMAGE, wanted, is_over))
        losing = asyncio.create_task(loss().wait())
        try:
            await asyncio.wait([asking, losing], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if is_over():
                raise fail(Code.CANCELLED, "nobody waits for it any more")
        except BusError as error:
            raise _typed(error) from None
        finally:
            asking.cancel()
            losing.cancel()


def _typed(error: BusError) -> BusError:
    """What it means to a client, whose image is good."""
    if error.code in (Code.NO_RESPONDERS, Code.SHUTTING_DOWN):
        return fail(Code.NO_REPLICA, "no vision replica is there to encode the image")
    if error.code in (Code.OVERLOADED, Code.DEADLINE_EXCEEDED):
        return error
    return fail(Code.VISION_ERROR, error.failure.message)


async def release_images(bus: Bus, held: Iterable[tuple[str, Handle]]) -> None:
    """Tell the replicas that hold these, as (replica, handle), that nobody needs them any more."""
    for vision, handle in held:
        await bus.tell(RELEASE_IMAGE.at(vision), ReleaseImage(held=handle))


async def _ask_any(bus: Bus, subject: Subject[M, R], wanted: M, is_over: Callable[[], bool] = lambda: False) -> R:
    """The answer of one of them. While nobody is there, or has room, or answers, they are asked again.

    Raises the last `BusError` when patience or the deadline is over, or `is_over`; any that asking again cannot mend at
    once.
    """
    loop = asyncio.get_running_loop()
    give_up_s, num_silences = loop.time() + PATIENCE_S, 0
    while True:
        now_ns = bus.seams.clock_ns()
        until_ns = min(now_ns + int(TRY_S * 1e9), wanted.deadline_ns or sys.maxsize)
        message = structs.replace(wanted, deadline_ns=until_ns)
        try:
            return await bus.ask(subject.any(), message, timeout_s=max(0, until_ns - now_ns) / 1e9)
        except BusError as error:
            is_silence = error.code is Code.DEADLINE_EXCEEDED
            num_silences += is_silence
            can_mend = num_silences < TRIES if is_silence else error.code in AGAIN and loop.time() < give_up_s
            if 0 < wanted.deadline_ns <= bus.seams.clock_ns():
                raise fail(Code.DEADLINE_EXCEEDED, "the deadline of the request has passed") from None
            if not can_mend or is_over():
                raise
        await asyncio.sleep(PAUSE_S)
