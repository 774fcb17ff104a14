"""What a request may fail of under a fault script, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from run.simulate.chaos.call import Call
from run.simulate.chaos.excuses import is_excused
from run.simulate.chaos.script import Ask, Disk, Fault, Hang, Leave, Script, Shape
from run.simulate.chaos.truth import answers
from schemas.failure import Code, Failure
from schemas.request import Failed

LONG = Hang(at_s=0.0, for_s=60.0, name="decode/d0")
LEFT = Leave(at_s=1.0, name="decode/d1", grace_s=0.0)


@pytest.mark.parametrize(
    ("faults", "shape", "is_one"),
    [
        ([LONG, LEFT], Shape(group="decode"), True),
        ([LONG, LEFT], Shape(), False),
        ([LONG, LEFT], Shape(group="prefill"), False),
        ([LONG], Shape(group="decode"), False),
        ([LONG, Leave(at_s=1.0, name="decode/d0", grace_s=0.0)], Shape(group="decode"), False),
        ([Hang(at_s=0.0, for_s=10.0, name="decode/d0"), LEFT], Shape(group="decode"), False),
        (
            [Hang(at_s=0.0, for_s=60.0, name="prefill/p0"), Disk(at_s=1.0, what="error", name="prefill/p1")],
            Shape(group="prefill"),
            False,
        ),
    ],
)
def test_a_rank_that_hangs_is_an_excuse_where_no_other_one_is_left(
    faults: list[Fault], shape: Shape, is_one: bool
) -> None:
    assert excused(Code.OVERLOADED, shape, faults, 0.5, 40.0) is is_one


@pytest.mark.parametrize(
    ("code", "begun_s", "ended_s", "is_one"),
    [
        (Code.VISION_ERROR, 0.5, 10.0, True),
        (Code.VISION_ERROR, 0.5, 8.0, False),
        (Code.VISION_ERROR, 20.0, 21.0, False),
        (Code.WORKER_LOST, 0.5, 10.0, False),
    ],
)
def test_images_are_lost_with_a_replica_that_leaves_and_nothing_else_is(
    code: Code, begun_s: float, ended_s: float, is_one: bool
) -> None:
    assert excused(code, Shape(vision=1), [LEFT], begun_s, ended_s, images=[0]) is is_one


def excused(
    code: Code, shape: Shape, faults: list[Fault], begun_s: float, ended_s: float, images: Sequence[int] = ()
) -> bool:
    ask = Ask(at_s=begun_s, id="r0", text=0, num_tokens=5, max_tokens=1)
    call = Call(ask, answers([ask])["r0"], begun_s=begun_s, heard_s=begun_s, ended_s=ended_s)
    call.ask, call.end = structs.replace(ask, images=list(images)), Failed(failure=Failure(code=code, message="no"))
    return is_excused(call, Script(0, shape, [ask], faults), 0.0)
