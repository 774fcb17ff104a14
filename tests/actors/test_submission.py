"""A request as entrypoint shards get it, one after another."""

from __future__ import annotations

from actors.recipe.submission import MAX_LOSSES, MAX_MOVES, PATIENCE_S, Submission, ids
from schemas.bulk import Payload
from schemas.request import Limits
from tests.actors.builders import prompt_bytes, submit


def test_each_shard_gets_it_under_another_name_with_the_output_so_far() -> None:
    one = Submission(submit("r", num_tokens=3), prompt_bytes(3))
    names, outputs = [one.id], list[tuple[bytes, int]]()
    for token in range(MAX_MOVES):
        one.emitted([token, 129279])
        assert one.move()
        names.append(one.id)
        message = one.message(Payload(inline=one.text))
        assert (message.request_id, message.num_prompt_tokens) == (one.id, 3)
        outputs.append((message.prompt.inline, message.num_output))
    assert names == ids("r") and len(set(names)) == MAX_MOVES + 1
    assert outputs[1] == (prompt_bytes(3) + bytes.fromhex("00000000 fff80100 01000000 fff80100"), 4)
    assert not one.move() and one.id == names[-1]


def test_nobody_is_waited_for_longer_than_until_its_deadline() -> None:
    late = Submission(submit("r", limits=Limits(max_tokens=1, deadline_ns=5 * 10**9)), b"")
    assert [late.patience_s(now_ns) for now_ns in (-(10**12), 3 * 10**9, 6 * 10**9)] == [PATIENCE_S, 2.0, 0.0]
    assert Submission(submit("r"), b"").patience_s(10**18) == PATIENCE_S


def test_who_is_lost_again_and_again_without_a_token_is_not_given_to_all() -> None:
    one = Submission(submit("r"), b"")
    one.move()
    one.emitted([5])
    assert [one.move() for _ in range(MAX_LOSSES + 1)] == [True] * MAX_LOSSES + [False]
