"""A step that an engine refuses ends the requests of that step, with a typed error, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from actors.decode.slots import Generation
from bus.pulse import MAX_FAILED, Sick
from kernels.engine import Chunk
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.request import Failed, Finished, FinishReason
from tests.actors.builders import submit
from tests.actors.core import VOCABULARY, core, info, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
COST = StepCost(step_ns=10_000_000)


class Picky(TimedEngine):
    """Fails in the middle of any step with a request whose id begins with `bad`; after `num_good` steps of it."""

    def __init__(self, num_good: int = 0) -> None:
        super().__init__(info(max_step_tokens=128), VOCABULARY, COST)
        self.num_good = num_good

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        spent_ns = await super().prefill(chunks)
        self._check([chunk.key for chunk in chunks])
        return spent_ns

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        new = await super().decode(keys)
        self._check(keys)
        return new

    def _check(self, keys: Sequence[str]) -> None:
        if any(key.startswith("bad") for key in keys):
            self.num_good -= 1
            if self.num_good < 0:
                raise ValueError("secret: no numbers")


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_prefill_step_that_fails_ends_the_requests_of_that_step(num_good: int) -> None:
    async def main() -> None:
        async with core(0, 1, COST) as system:
            await system.add_prefill("p0", Picky(num_good))
            names = ["a", "b", "bad", "c", "d"]
            ends = dict(
                zip(
                    names,
                    await asyncio.gather(*(system.finish(submit(name, num_tokens=300)) for name in names)),
                    strict=True,
                )
            )
            assert [name for name, (_, end) in ends.items() if end == LENGTH] in (["a", "b", "c", "d"], ["a", "b", "d"])
            for tokens, end in ends.values():
                assert end == LENGTH or (tokens == [] and is_internal(end))
            assert (await system.finish(submit("after")))[1] == LENGTH
            assert not system.tasks["prefill/p0"].done()
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_prompt_that_cannot_be_exported_ends_alone() -> None:
    class Sealed(TimedEngine):
        async def export(self, key: str) -> bytes:
            if key == "bad":
                raise ValueError("secret: no numbers")
            return await super().export(key)

    async def main() -> None:
        async with core(0, 1, COST) as system:
            await system.add_prefill("p0", Sealed(info(), VOCABULARY, COST))
            ends = await asyncio.gather(*(system.finish(submit(name)) for name in ("a", "bad", "c")))
            assert [end == LENGTH for _, end in ends] == [True, False, True] and is_internal(ends[1][1])
            assert not system.tasks["prefill/p0"].done()
            assert await quiet(system) == {}

    run_virtual(main())


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_decode_step_that_fails_ends_the_requests_of_that_step(num_good: int) -> None:
    async def main() -> None:
        async with core(1, 0, COST) as system:
            await system.add_decode("d0", Picky(num_good))
            others = [asyncio.create_task(system.finish(submit(name, num_tokens=300))) for name in ("a", "b")]
            await asyncio.gather(*others)
            together = [submit(name, max_tokens=20) for name in ("bad", "c")]
            results = await asyncio.gather(*map(system.finish, together))
            assert is_internal(results[0][1]) and len(results[0][0]) == num_good
            assert results[1][1] == LENGTH or is_internal(results[1][1])
            assert (await system.finish(submit("after")))[1] == LENGTH
            assert not system.tasks["decode/d0"].done()
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_request_that_cannot_go_on_ends_alone() -> None:
    class Silent(TimedEngine):
        async def decode(self, keys: Sequence[str]) -> list[list[int]]:
            return [[] if key == "bad" else new for key, new in zip(keys, await super().decode(keys), strict=True)]

    async def main() -> None:
        async with core(1, 0, COST) as system:
            await system.add_decode("d0", Silent(info(), VOCABULARY, COST))
            ends = await asyncio.gather(*(system.finish(submit(name)) for name in ("a", "bad", "c")))
            assert [end == LENGTH for _, end in ends] == [True, False, True] and is_internal(ends[1][1])
            assert await quiet(system) == {}

    run_virtual(main())


def is_internal(end: object) -> bool:
    return isinstance(end, Failed) and end.failure.code is Code.INTERNAL and "secret" not in end.failure.message


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_fails_at_everything_is_replaced_and_the_third_request_goes_on(role: str) -> None:
    """The requests of its last step are lost with it, not ended by it: another replica has them then."""

    async def main() -> None:
        async with core(int(role == "decode"), int(role == "prefill"), COST) as system:
            await (system.add_prefill if role == "prefill" else system.add_decode)("sick", Picky())
            for number in range(MAX_FAILED - 1):
                assert is_internal((await system.finish(submit(f"bad{number}")))[1])
            assert not system.tasks[f"{role}/sick"].done()
            running = asyncio.create_task(system.finish(submit("bad-last")))
            with pytest.raises(Sick):
                await system.tasks.pop(f"{role}/sick")
            await (system.with_prefill if role == "prefill" else system.with_decode)("well", COST)
            assert (await running)[1] == LENGTH

    run_virtual(main())


@pytest.mark.parametrize("is_grammar", [True, False])
def test_requests_that_cannot_be_kept_to_their_grammars_are_not_the_engine(
    is_grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(TimedEngine):
        async def decode(self, keys: Sequence[str]) -> list[list[int]]:
            return [[] for _ in await super().decode(keys)]

    async def main() -> None:
        async with core(1, 0, COST) as system:
            await system.add_decode("d0", Silent(info(), VOCABULARY, COST))
            for number in range(MAX_FAILED):
                await system.send(submit(f"bad{number}"))
                await asyncio.sleep(1)
            assert system.tasks["decode/d0"].done() is not is_grammar
            if not is_grammar:
                with pytest.raises(Sick):
                    await system.tasks.pop("decode/d0")

    if is_grammar:
        monkeypatch.setattr(Generation, "trouble", "no token is left")
    run_virtual(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_fails_now_and_then_is_not(role: str) -> None:
    async def main() -> None:
        async with core(int(role == "decode"), int(role == "prefill"), COST) as system:
            await (system.add_prefill if role == "prefill" else system.add_decode)("p0", Picky())
            for number in range(2 * MAX_FAILED):
                assert is_internal((await system.finish(submit(f"bad{number}")))[1])
                if number % (MAX_FAILED - 1):
                    assert (await system.finish(submit(f"good{number}")))[1] == LENGTH
            assert await quiet(system) == {}

    run_virtual(main())
