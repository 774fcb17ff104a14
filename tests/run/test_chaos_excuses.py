"""What a request may fail of under a fault script, and what it may not."""

from __future__ import annotations

import pytest

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
    ask = Ask(at_s=0.5, id="r0", text=0, num_tokens=5, max_tokens=1)
    call = Call(ask, answers([ask])["r0"], begun_s=0.5, heard_s=0.5, ended_s=40.0)
    call.end = Failed(failure=Failure(code=Code.OVERLOADED, message="full"))
    assert is_excused(call, Script(0, shape, [ask], faults), 0.0) is is_one
