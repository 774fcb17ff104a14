"""Files fetched from elsewhere, by calls that may hang: in threads of their own, so many at a time."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from bus.bus import Bus
from schemas.failure import Code, Failure

MAX_THREADS = 32
"""A call that hangs has its thread until it ends by itself, whether anyone waits for it or not."""

MAX_HELD_BYTES = 128 * 1024 * 1024
"""Of files that are looked at; others are on their way, in threads."""

SHARE = 3
"""A tenant may have so many times the threads and bytes that are free: three quarters of all, alone, and what it leaves
is shared in the same way, so that no two tenants have all."""

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Files of one request together; it can name many that are short to name."""

AT_ONCE = 4
"""Files of one request that are fetched at a time."""

TIMEOUT_S = 10.0
"""For all files of one request, the wait for threads included: its client hears of no more than of one that hangs."""

CHECK_S = 0.05
_INSTEAD = "retry, or send the image itself, in base64"
log = logging.getLogger(__name__)

Fetch = Callable[[str], bytes | Failure]


class Fetches:
    """Fetches files by `fetch`, a call that blocks. Threads that still hang do not hold up the end of the process."""

    def __init__(self, bus: Bus, fetch: Fetch) -> None:
        self._bus = bus
        self._fetch = fetch
        self._running = Counter[str]()
        self._held = Counter[str]()

    @asynccontextmanager
    async def files(
        self, urls: Iterable[str], tenant: str, deadline_ns: int, is_over: Callable[[], bool]
    ) -> AsyncIterator[dict[str, bytes | Failure]]:
        """The files at these URLs of one request, each fetched once, or why there is none; counted as held inside.

        `deadline_ns` is unix time, 0 for none. Once one is missing, or `is_over`, nobody waits for the others: they
        are `cancelled`. Others: what `fetch` says, image_unreachable, overloaded, deadline_exceeded, bad_request when
        they are too large together.
        """
        turn, found, num_bytes = asyncio.Semaphore(AT_ONCE), dict[str, bytes | Failure](), 0
        until_ns, has_failed = self._bus.seams.clock_ns() + int(TIMEOUT_S * 1e9), False

        async def fetch(url: str) -> None:
            nonlocal num_bytes, has_failed
            async with turn:
                outcome = await self._wait(url, tenant, until_ns, deadline_ns, lambda: has_failed or is_over())
            if isinstance(outcome, bytes):
                if num_bytes + len(outcome) > MAX_REQUEST_BYTES:
                    message = f"the images at URLs have more than the {MAX_REQUEST_BYTES} bytes taken of one request"
                    outcome = Failure(code=Code.BAD_REQUEST, message=message)
                elif not _is_share(self._held, tenant, len(outcome), MAX_HELD_BYTES):
                    outcome = Failure(code=Code.OVERLOADED, message="too many fetched images are held: retry later")
                else:
                    num_bytes += len(outcome)
                    self._held[tenant] += len(outcome)
            has_failed = has_failed or isinstance(outcome, Failure)
            found[url] = outcome

        try:
            await asyncio.gather(*map(fetch, dict.fromkeys(urls)))
            yield found
        finally:
            self._held -= Counter({tenant: num_bytes})

    async def _wait(
        self, url: str, tenant: str, until_ns: int, deadline_ns: int, is_over: Callable[[], bool]
    ) -> bytes | Failure:
        """What comes of one URL, as long as it may take."""
        clock_ns = self._bus.seams.clock_ns
        fetching: asyncio.Future[bytes | Failure] | None = None
        while not is_over():
            has_room = _is_share(self._running, tenant, 1, MAX_THREADS)
            if clock_ns() >= (deadline_ns or sys.maxsize):
                why = "the deadline of the request has passed"
                return Failure(code=Code.DEADLINE_EXCEEDED, message=why, field="deadline")
            if clock_ns() >= until_ns:
                return _late(is_full=fetching is None and not has_room)
            if fetching is None and has_room:
                fetching = self._begin(url, tenant)
            if fetching is None:
                await asyncio.sleep(CHECK_S)
            elif (await asyncio.wait([fetching], timeout=CHECK_S))[0]:
                return fetching.result()
        return Failure(code=Code.CANCELLED, message="nobody waits for it any more")

    def _begin(self, url: str, tenant: str) -> asyncio.Future[bytes | Failure]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes | Failure] = loop.create_future()

        def end(outcome: bytes | Failure) -> None:
            self._running -= Counter({tenant: 1})
            future.set_result(outcome)

        def run() -> None:
            try:
                outcome = self._fetch(url)
            except Exception:
                log.exception("an image at a URL could not be fetched")
                outcome = Failure(code=Code.IMAGE_UNREACHABLE, message=f"the image could not be fetched: {_INSTEAD}")
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(end, outcome)

        threading.Thread(target=run, name="fetch", daemon=True).start()
        self._running[tenant] += 1
        return future


def _is_share(used: Counter[str], tenant: str, num: int, limit: int) -> bool:
    """Whether a tenant may have `num` more, of what there is `limit` of."""
    num_free = limit - used.total()
    return num <= num_free and used[tenant] + num <= SHARE * num_free


def _late(*, is_full: bool) -> Failure:
    if is_full:
        return Failure(code=Code.OVERLOADED, message=f"too many images are being fetched: {_INSTEAD}")
    message = f"the images at URLs did not come within {TIMEOUT_S:.0f} s: {_INSTEAD}"
    return Failure(code=Code.IMAGE_UNREACHABLE, message=message)
