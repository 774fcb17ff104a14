"""Images on their way through vision replicas: asked after by any that is there, encoded where the balancer says."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.place import place
from bus.subjects import (
    CANCEL_VISION,
    ENCODE_IMAGE,
    RELEASE_IMAGE,
    RELEASE_VISION,
    RESOLVE_IMAGE,
    ROUTE_VISION,
    Address,
)
from schemas.bulk import Handle
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel
from schemas.routing import Route, Routed
from schemas.vision import EncodeImage, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage

M = TypeVar("M", ResolveImage, EncodeImage)
R = TypeVar("R")
T = TypeVar("T")
_Wanted = ResolveImage | EncodeImage
_Attempt = Awaitable[T | None]

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

_UNKNOWN = ""
"""Which replica it is that was asked as any of them."""


class AnyVision:
    """Whoever of the vision replicas is there. What one may have been at when it ended is asked anew, once."""

    def __init__(self, bus: Bus, bulk: Bulk) -> None:
        self._bus = bus
        self._bulk = bulk
        self._losses: dict[asyncio.Future[None], str] = {}

    def on_exited(self, exited: ProcessExited) -> None:
        """To be told of every process that ended: nobody else says that there will be no answer."""
        ids = exited.ids(Role.VISION)
        for loss, replica in self._losses.items():
            if ids and replica in (*ids, _UNKNOWN) and not loss.done():
                loss.set_result(None)

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
                    wanted = ResolveImage(image=image, deadline_ns=deadline_ns)
                    try:
                        ask = functools.partial(self._ask, RESOLVE_IMAGE.any(), wanted, _UNKNOWN)
                        return await self._insist(wanted, is_over, ask)
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

        def encode(one: EncodeImage) -> Awaitable[ImageEncoded]:
            return self._insist(one, is_over, lambda: self._place(one, is_over))

        tasks = [asyncio.ensure_future(encode(one)) for one in wanted]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self.cancel(wanted[0].request_id)
            await self.release([(one.vision, one.embeddings) for one in ended if isinstance(one, ImageEncoded)])
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

    async def _insist(self, wanted: _Wanted, is_over: Callable[[], bool], attempt: Callable[[], _Attempt[T]]) -> T:
        """What comes of an attempt; it is made anew as long as that can mend what went wrong."""
        loop, tally = asyncio.get_running_loop(), Counter[Code]()
        give_up_s = loop.time() + PATIENCE_S
        while not self._is_over(wanted, is_over):
            try:
                if (outcome := await attempt()) is not None:
                    return outcome
            except BusError as error:
                tally[error.code] += 1
                if tally[Code.WORKER_LOST] == MAX_LOSSES:
                    why = f"the image was given to {MAX_LOSSES} vision replicas that were lost"
                    raise fail(Code.VISION_ERROR, why) from None
                is_early = error.code in AGAIN and loop.time() < give_up_s
                is_silence = error.code is Code.DEADLINE_EXCEEDED and tally[error.code] < TRIES
                if not (is_early or is_silence or error.code is Code.WORKER_LOST):
                    raise
            await asyncio.sleep(PAUSE_S)
        raise fail(Code.CANCELLED, "nobody waits for it any more")

    async def _place(self, wanted: EncodeImage, is_over: Callable[[], bool]) -> ImageEncoded | None:
        """Have it encoded where the balancer says. None once it is over."""
        encoded: ImageEncoded | None = None
        refusal: BusError | None = None

        async def attempt(routed: Routed) -> bool:
            nonlocal encoded, refusal
            message = structs.replace(wanted, reservation=routed.reservation, balancer=routed.balancer)
            try:
                encoded = await self._ask(ENCODE_IMAGE.at(routed.replica), message, routed.replica)
            except BusError as error:
                if error.code not in AGAIN:
                    raise
                refusal = error
            return encoded is not None

        is_over_now = functools.partial(self._is_over, wanted, is_over)
        route = Route(request_id=wanted.request_id, num_new=wanted.image.num_patches, digest=wanted.image.digest)
        subjects = (ROUTE_VISION, RELEASE_VISION)
        try:
            await place(self._bus, *subjects, route, attempt, patience_s=PATIENCE_S, is_over=is_over_now)
        except BusError as error:
            # That there is no other replica says less than why the last one did not take it.
            raise refusal or error if error.code is Code.NO_REPLICA else error from None
        return encoded

    def _is_over(self, wanted: _Wanted, is_over: Callable[[], bool]) -> bool:
        """Nobody waits for it any more. Raises deadline_exceeded when that is why."""
        if 0 < wanted.deadline_ns <= self._bus.seams.clock_ns():
            raise fail(Code.DEADLINE_EXCEEDED, "the deadline of the request has passed", field="deadline")
        return is_over()

    async def _ask(self, address: Address[M, R], wanted: M, replica: str) -> R:
        """The answer of one replica. Raises also worker_lost, when it ended meanwhile."""
        now_ns = self._bus.seams.clock_ns()
        until_ns = min(now_ns + int(TRY_S * 1e9), wanted.deadline_ns or sys.maxsize)
        message, timeout_s = structs.replace(wanted, deadline_ns=until_ns), max(0, until_ns - now_ns) / 1e9
        asking = asyncio.create_task(self._bus.ask(address, message, timeout_s=timeout_s))
        loss = asyncio.get_running_loop().create_future()
        self._losses[loss] = replica
        try:
            await asyncio.wait([asking, loss], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise fail(Code.WORKER_LOST, "the vision replica was lost")
        finally:
            asking.cancel()
            del self._losses[loss]


def _typed(error: BusError) -> BusError:
    """What it means to a client, whose image is good."""
    if error.code in (Code.NO_RESPONDERS, Code.SHUTTING_DOWN, Code.NO_REPLICA):
        return fail(Code.NO_REPLICA, "no vision replica can be reached to encode the image")
    if error.code in (Code.OVERLOADED, Code.DEADLINE_EXCEEDED):
        return error
    return fail(Code.VISION_ERROR, error.failure.message)
