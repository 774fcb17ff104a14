"""Files fetched in threads: bounded, on time, and without anyone waiting for those that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from bus import fetches
from bus.bus import Bus, Seams
from bus.fetches import Fetches
from bus.memory import MemoryBroker, MemoryWire
from schemas.failure import Code, Failure
from tests.conftest import Run

LIMIT_S = 30.0


class Site:
    """Serves what it is told to; a URL of `hangs` only when the test lets it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | Failure] = {}
        self.asked: list[str] = []
        self.release = threading.Event()

    def __call__(self, url: str) -> bytes | Failure:
        self.asked.append(url)
        if url.startswith("hangs"):
            self.release.wait(LIMIT_S)
        if url == "raises":
            raise ValueError(url)
        return self.files.get(url, url.encode())


@pytest.fixture
def site() -> Iterator[Site]:
    one = Site()
    yield one
    one.release.set()


def make(site: Site) -> tuple[Fetches, Bus]:
    bus = Bus(MemoryWire(MemoryBroker()))
    return Fetches(bus, site), bus


async def fetch(
    some: Fetches, *urls: str, tenant: str = "t", deadline_ns: int = 0, is_over: Callable[[], bool] = lambda: False
) -> list[bytes | Code]:
    async with some.files(urls, tenant, deadline_ns, is_over) as found:
        return [file.code if isinstance(file, Failure) else file for file in map(found.__getitem__, urls)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_url_is_fetched_once_and_its_bytes_are_held_meanwhile(run_async: Run, site: Site) -> None:
    async def main() -> None:
        some, _ = make(site)
        async with some.files(["a", "bc", "a"], "t", 0, lambda: False) as found:
            assert found == {"a": b"a", "bc": b"bc"} and sorted(site.asked) == ["a", "bc"]
            assert some._held == {"t": 3}
        assert not some._held and not some._running

    run_async(main())


def test_one_that_fails_ends_the_wait_for_the_others(run_async: Run, site: Site) -> None:
    site.files["bad"] = Failure(code=Code.BAD_REQUEST, message="no")

    async def main() -> None:
        some, _ = make(site)
        assert await fetch(some, "hangs", "bad", "c") == [Code.CANCELLED, Code.BAD_REQUEST, b"c"]
        assert some._running == {"t": 1}  # its thread is not free before it ends
        site.release.set()
        await until(lambda: not some._running)
        assert await fetch(some, "raises") == [Code.IMAGE_UNREACHABLE]
        assert not some._running and not some._held

    run_async(main())


def test_nobody_waits_longer_than_the_limit_the_deadline_or_the_client(
    run_async: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        some, bus = make(site)
        deadline_ns = bus.seams.clock_ns() + 10**7
        assert await fetch(some, "hangs", deadline_ns=deadline_ns) == [Code.DEADLINE_EXCEEDED]
        asked = len(site.asked)
        assert await fetch(some, "hangs", is_over=lambda: len(site.asked) > asked) == [Code.CANCELLED]
        monkeypatch.setattr(fetches, "TIMEOUT_S", 0.01)
        assert await fetch(some, "hangs") == [Code.IMAGE_UNREACHABLE]

    run_async(main())


def test_files_of_one_request_have_one_limit_in_all(
    run_async: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "AT_ONCE", 1)

    async def main() -> None:
        seams = Seams(clock_ns=lambda: 1 + 6 * 10**9 * some._held.total())  # each takes six seconds
        some = Fetches(Bus(MemoryWire(MemoryBroker()), seams), site)
        assert await fetch(some, "a", "b", "c", "d") == [b"a", b"b", Code.IMAGE_UNREACHABLE, Code.CANCELLED]

    run_async(main())


def test_threads_that_hang_are_bounded_and_leave_room_for_other_tenants(
    run_async: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "MAX_THREADS", 16)

    async def main() -> None:
        some, _ = make(site)
        hanging = list[asyncio.Task[list[bytes | Code]]]()
        for tenant, num, num_running in (("t", 14, 12), ("other", 5, 15), ("third", 1, 16)):
            assert await fetch(some, "x", tenant=tenant) == [b"x"]
            hanging += [asyncio.create_task(fetch(some, "hangs", tenant=tenant)) for _ in range(num)]
            await until(lambda num_running=num_running: some._running.total() == num_running)  # type: ignore[misc]
        monkeypatch.setattr(fetches, "TIMEOUT_S", 0.01)
        assert await fetch(some, "y", tenant="fourth") == [Code.OVERLOADED]
        assert some._running == {"t": 12, "other": 3, "third": 1} and "y" not in site.asked
        site.release.set()  # those that waited for a thread have their turn
        assert await asyncio.gather(*hanging) == [[b"hangs"]] * 20
        assert not some._running

    run_async(main())


def test_a_request_has_some_fetched_at_a_time(run_async: Run, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "AT_ONCE", 2)

    async def main() -> None:
        some, _ = make(site)
        asking = asyncio.create_task(fetch(some, "hangs1", "hangs2", "c"))
        await until(lambda: len(site.asked) == 2)
        assert await fetch(some, "d") == [b"d"] and "c" not in site.asked
        site.release.set()
        assert await asking == [b"hangs1", b"hangs2", b"c"]

    run_async(main())


def test_bytes_are_bounded_by_request_and_in_all(
    run_async: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "MAX_REQUEST_BYTES", 5)
    monkeypatch.setattr(fetches, "MAX_HELD_BYTES", 8)
    monkeypatch.setattr(fetches, "AT_ONCE", 1)

    async def main() -> None:
        some, _ = make(site)
        assert await fetch(some, "aaa", "bbb", "c") == [b"aaa", Code.BAD_REQUEST, Code.CANCELLED]
        async with some.files(["aaa", "bb"], "t", 0, lambda: False):
            assert await fetch(some, "cccc") == [Code.OVERLOADED]
            async with some.files(["cc"], "t", 0, lambda: False):
                assert await fetch(some, "d") == [Code.OVERLOADED]
                assert await fetch(some, "d", tenant="other") == [b"d"]
        assert await fetch(some, "cccc") == [b"cccc"]

    run_async(main())


def test_a_thread_that_hangs_outlives_its_loop_in_peace(site: Site) -> None:
    async def main() -> None:
        some, bus = make(site)
        assert await fetch(some, "hangs", deadline_ns=bus.seams.clock_ns() + 10**6) == [Code.DEADLINE_EXCEEDED]

    asyncio.run(main())
    [thread] = [thread for thread in threading.enumerate() if thread.name == "fetch"]
    assert thread.daemon
    site.release.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
