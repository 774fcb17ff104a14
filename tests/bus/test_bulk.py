"""Bulk bytes: one suite over sockets and memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from bus.bulk import INLINE_BYTES, Bulk, MemoryBulk, MemoryHub, SocketBulk
from bus.bus import BusError
from bus.subjects import MAX_MESSAGE_BYTES
from schemas.bulk import Handle, Payload
from schemas.failure import Code, Failure
from tests.conftest import Run

TIMEOUT_S = 10.0
MIB = 1024 * 1024

Make = Callable[..., Bulk]


@pytest.fixture(params=["socket", "memory"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes bulks that can reach each other."""
    if request.param == "socket":
        return SocketBulk
    hub = MemoryHub()
    return lambda **settings: MemoryBulk(hub, **settings)


@asynccontextmanager
async def started(*bulks: Bulk) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for bulk in bulks:
            await bulk.start()
            stack.push_async_callback(bulk.close)
        yield


async def pull_fails(bulk: Bulk, handle: Handle, timeout_s: float = TIMEOUT_S) -> Failure:
    with pytest.raises(BusError) as caught:
        await bulk.pull(handle, timeout_s=timeout_s)
    assert caught.value.code == Code.TRANSFER_FAILED
    return caught.value.failure


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("size", [0, 1, 9, 256 * 1024, 3 * MIB + 7])
def test_a_pull_gives_the_bytes_and_frees_them(run_async: Run, make: Make, size: int) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            data = os.urandom(size)
            handle = owner.offer(data, lease_s=60)
            assert owner.num_offers == 1
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == data
            await until(lambda: owner.num_offers == 0)
            assert "pulled already" in (await pull_fails(reader, handle)).message

    run_async(main())


def test_a_shared_offer_is_there_for_all_until_it_is_withdrawn(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, readers = make(), [make(), make()]
        async with started(owner, *readers):
            handle = owner.offer(b"x" * 5000, lease_s=60, is_shared=True)
            for reader in readers * 2:
                assert await reader.pull(handle, timeout_s=TIMEOUT_S) == b"x" * 5000
            assert owner.num_offers == 1
            owner.withdraw(handle)
            assert owner.num_offers == 0
            await pull_fails(readers[0], handle)
            payload = await owner.wrap(b"y" * (INLINE_BYTES + 1), is_shared=True)
            for reader in readers:
                assert len(await reader.unwrap(payload)) == INLINE_BYTES + 1
            assert owner.num_offers == 1

    run_async(main())


def test_many_pulls_at_once_and_one_after_another(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, *readers = (make() for _ in range(4))
        async with started(owner, *readers):
            for _ in range(3):
                payloads = [os.urandom(100_000 + i) for i in range(24)]
                handles = [owner.offer(data, lease_s=60) for data in payloads]
                assert len({handle.key for handle in handles}) == 24
                pulls = [readers[i % 3].pull(handle, timeout_s=TIMEOUT_S) for i, handle in enumerate(handles)]
                assert await asyncio.gather(*pulls) == payloads
            await until(lambda: owner.num_offers == 0)

    run_async(main())


def test_a_lease_that_is_over_frees_the_bytes(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            handle = owner.offer(b"x" * 100, lease_s=0.01)
            kept = owner.offer(b"y", lease_s=60)
            await until(lambda: owner.num_offers == 1)
            assert "lease is over" in (await pull_fails(reader, handle)).message
            assert await reader.pull(kept, timeout_s=TIMEOUT_S) == b"y"

    run_async(main())


def test_a_withdrawn_offer_is_gone(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            handle = owner.offer(b"x", lease_s=60)
            owner.withdraw(handle)
            owner.withdraw(handle)
            assert owner.num_offers == 0
            await pull_fails(reader, handle)

    run_async(main())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"generation": 99}, "stale"),
        ({"key": "0" * 31 + "f"}, "no such offer"),
        ({"checksum": 1}, "damaged"),
        ({"size_bytes": 101}, "announced 100 bytes"),
        ({"size_bytes": 99}, "announced 100 bytes"),
        ({"size_bytes": 1 << 50}, "bytes allowed"),
    ],
)
def test_a_handle_that_does_not_fit_the_offer_fails_and_frees_nothing(
    run_async: Run, make: Make, change: dict[str, Any], why: str
) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            handle = owner.offer(b"x" * 100, lease_s=60)
            assert why in (await pull_fails(reader, msgspec.structs.replace(handle, **change))).message
            assert owner.num_offers == 1
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == b"x" * 100

    run_async(main())


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:1", "mem://nobody", "tcp://127.0.0.1", "http://127.0.0.1:1"])
def test_an_owner_nobody_can_reach_is_a_typed_failure(run_async: Run, make: Make, address: str) -> None:
    async def main() -> None:
        reader = make()
        async with started(reader):
            handle = Handle(address=address, key="00" * 16, generation=1, size_bytes=5, checksum=0)
            assert "cannot connect" in (await pull_fails(reader, handle)).message

    run_async(main())


def test_an_owner_that_closed_is_a_typed_failure(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            first, second = owner.offer(b"1", lease_s=60), owner.offer(b"2", lease_s=60)
            assert await reader.pull(first, timeout_s=TIMEOUT_S) == b"1"
            await owner.close()
            await owner.close()
            assert owner.num_offers == 0
            await pull_fails(reader, second)

    run_async(main())


def test_an_owner_holds_only_so_much(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, reader = make(max_bytes=1000), make()
        async with started(owner, reader):
            handle = owner.offer(bytes(600), lease_s=60)
            with pytest.raises(BusError) as caught:
                owner.offer(bytes(401), lease_s=60)
            assert caught.value.code == Code.OVERLOADED
            await reader.pull(handle, timeout_s=TIMEOUT_S)
            await until(lambda: owner.num_offers == 0)
            owner.offer(bytes(1000), lease_s=60)

    run_async(main())


def test_a_payload_travels_inline_when_it_fits_and_by_handle_when_not(run_async: Run, make: Make) -> None:
    async def main() -> None:
        owner, reader = make(), make()
        async with started(owner, reader):
            small = await owner.wrap(bytes(INLINE_BYTES))
            assert small == Payload(inline=bytes(INLINE_BYTES))
            assert len(msgspec.msgpack.encode(small)) < MAX_MESSAGE_BYTES * 0.8
            large = await owner.wrap(bytes(INLINE_BYTES + 1))
            assert large.handle is not None
            assert large.inline == b""
            assert await reader.unwrap(small) == bytes(INLINE_BYTES)
            assert await reader.unwrap(large) == bytes(INLINE_BYTES + 1)
            assert await reader.unwrap(await owner.wrap(b"")) == b""

    run_async(main())


def test_a_cut_memory_bulk_is_out_of_reach(run_async: Run) -> None:
    async def main() -> None:
        hub = MemoryHub()
        dead, alive = MemoryBulk(hub), MemoryBulk(hub)
        async with started(dead, alive):
            theirs, ours = dead.offer(b"1", lease_s=60), alive.offer(b"2", lease_s=60)
            dead.cut()
            await pull_fails(alive, theirs)
            await pull_fails(dead, ours)
            await dead.start()
            await pull_fails(alive, dead.offer(b"3", lease_s=60))
            assert alive.num_offers == 1

    run_async(main())
