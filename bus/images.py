"""Images on their way through vision replicas: asked after, encoded and let go, by any replica that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import ENCODE_IMAGE, RELEASE_IMAGE, RESOLVE_IMAGE, Subject
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.message import Message
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

M = TypeVar("M", bound=Message)
R = TypeVar("R")

RESOLVE_S = 30.0
ENCODE_S = 120.0
"""How long one replica may take, its queue included."""

PATIENCE_S = 20.0
"""How long to wait for a replica to be there, or to have room: one restarts within this time."""

PAUSE_S = 0.1
AGAIN = frozenset({Code.NO_RESPONDERS, Code.OVERLOADED, Code.SHUTTING_DOWN})
"""Another replica, or the same one a little later, may do it."""


async def resolve_images(bus: Bus, bulk: Bulk, files: Sequence[bytes], tenant: str) -> list[ImageResolved | Failure]:
    """What these files are as images, or why they are none; all are asked after at once."""

    async def resolve(file: bytes) -> ImageResolved | Failure:
        try:
            image = await bulk.wrap(file, is_shared=True)
            try:
                return await _ask_any(bus, RESOLVE_IMAGE, ResolveImage(image=image, tenant=tenant), RESOLVE_S)
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
        asking = asyncio.create_task(_ask_any(bus, ENCODE_IMAGE, wanted, ENCODE_S, is_over))
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


async def _ask_any(
    bus: Bus, subject: Subject[M, R], message: M, timeout_s: float, is_over: Callable[[], bool] = lambda: False
) -> R:
    """The answer of one of them. While nobody is there, or has room, they are asked again.

    Raises the last `BusError` after PATIENCE_S, or once `is_over`, and any that asking again cannot mend at once.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + PATIENCE_S
    while True:
        try:
            return await bus.ask(subject.any(), message, timeout_s=timeout_s)
        except BusError as error:
            if error.code not in AGAIN or loop.time() + PAUSE_S > give_up_s or is_over():
                raise
        await asyncio.sleep(PAUSE_S)
