"""A cluster file that changes while its cluster runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from run import changes
from run.changes import Change, follow
from run.cluster import ClusterError, GroupPlace, Member, ProcessSpec
from tests.conftest import Run


def process(name: str, *members: str) -> ProcessSpec:
    return ProcessSpec(name, tuple(map(Member.parse, members)), num_threads=1)


FRONT = process("front", "gateway/g0", "recipe/r0", "entrypoint/e0")
D0, D1 = process("decode-0", "decode/d0"), process("decode-1", "decode/d1")
RANKS = tuple(replace(process(f"g-{i}", f"decode/g-{i}"), group=GroupPlace(("g-0", "g-1"), i)) for i in range(2))


def test_what_comes_is_there_before_others_leave() -> None:
    change = Change.between((FRONT, D0), (FRONT, D1))
    assert (change.first, change.leaving, change.then) == ((D1,), (D0,), ())
    assert change.specs == (FRONT, D1)


def test_what_takes_a_place_comes_when_that_is_free() -> None:
    larger, moved = replace(D0, num_slots=8), process("other", "decode/d1")
    change = Change.between((FRONT, D0, D1), (FRONT, larger, moved))
    assert (change.first, change.leaving, change.then) == ((), (D0, D1), (larger, moved))


def test_what_goes_on_keeps_its_threads() -> None:
    shared = [replace(spec, num_threads=7) for spec in (FRONT, D0, *RANKS)]
    change = Change.between((FRONT, D0, *RANKS), shared)
    assert change.is_none and change.specs == (FRONT, D0, *RANKS)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ((replace(FRONT, members=FRONT.members[:2]), D0, *RANKS), "front: one with gateway/g0"),
        ((FRONT, D0, process("cache", "writer/w0"), *RANKS), "cache: one with writer/w0"),
        ((FRONT, D0), "g-0: a group"),
        ((FRONT, D0, *(replace(one, num_slots=3) for one in RANKS)), "g-0: a group"),
    ],
)
def test_what_cannot_be_changed_is_said_by_name(wanted: tuple[ProcessSpec, ...], named: str) -> None:
    with pytest.raises(ClusterError, match=f"^{named} cannot be changed while it runs"):
        Change.between((FRONT, D0, *RANKS), wanted)


def test_a_file_is_read_when_it_is_whole_and_a_wrong_one_changes_nothing(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOOK_S", 0.01)
    path, said, done = tmp_path / "c.toml", list[str](), asyncio.Queue[Change]()
    path.write_text("one")  # while what it said before was being started

    def read() -> Change:
        known = {"two": (FRONT, D0, D1), "one": (FRONT, D0)}
        if (text := path.read_text()) == "nobody may read it":
            raise PermissionError(text)
        if text not in known:
            raise ClusterError(f"no {text}")
        return Change.between((FRONT, D0, D1), known[text])

    async def main() -> None:
        following = asyncio.create_task(follow(path, read, done.put, said.append))
        async with asyncio.timeout(10):
            assert (await done.get()).leaving == (D1,)
            for num_said, text in enumerate(("nonsense", "nobody may read it"), 1):
                path.write_text(text)
                while len(said) < num_said:
                    await asyncio.sleep(0.01)
            path.write_text("two")
            await asyncio.sleep(0.05)
            path.write_text("one")
            assert (await done.get()).leaving == (D1,)
        assert said == ["nothing is changed: no nonsense", "nothing is changed: nobody may read it"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    run_async(main())


def test_a_file_that_is_being_written_is_left_alone(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOOK_S", 0.0)
    looks: list[int] = []

    def stamp(path: Path) -> tuple[int, int, int]:
        looks.append(min(len(looks), 3))
        return looks[-1], 0, 0

    def change() -> Change:
        raise asyncio.CancelledError  # an end of the test

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await follow(Path("c.toml"), change, asyncio.Queue[Change]().put, lambda text: None)
        assert looks == [0, 1, 2, 3, 3]

    monkeypatch.setattr(changes, "_stamp", stamp)
    run_async(main())
