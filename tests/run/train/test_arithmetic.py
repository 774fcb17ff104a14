"""The thought that adds and subtracts, and answers that are true."""

from __future__ import annotations

import operator
import re

from run.train.example import Example
from run.train.seeds import rng
from run.train.tasks.arithmetic import columns, comparison, example

SIGNS = {"+": operator.add, "plus": operator.add, "-": operator.sub, "minus": operator.sub}
SIGNS |= {"*": operator.mul, "times": operator.mul}


def test_a_thought_carries_and_borrows() -> None:
    assert columns(482, "+", 619) == "482 + 619\n2+9+0=11\n8+1+1=10\n4+6+1=11\n1101"
    assert columns(805, "-", 17) == "805 - 017\n5-7-0=18\n0-1-1=18\n8-0-1=07\n0788"


def test_a_thought_compares_until_digits_differ() -> None:
    assert comparison(487, 482) == "487 482\n4=4\n8=8\n7>2"
    assert comparison(45, 120) == "045 120\n0<1"


def test_answers_are_true() -> None:
    signs = set()
    for index in range(300):
        made = example(rng("train", "arithmetic", index), 0)
        question, content = made.request["messages"][-1]["content"], made.answer["content"]
        if found := re.search(r"(\d+),? (\S+) (\d+)", question):
            a, sign, b = int(found[1]), found[2], int(found[3])
            signs.add(sign)
            if sign in SIGNS:
                assert int(re.findall(r"\d+", content)[-1]) == SIGNS[sign](a, b) >= 0, question
                continue
            pick = max if "larger" in question else min
            assert content.startswith(f"Of {a} and {b}, {pick(a, b)} is "), question
        else:
            _check_count(made)
            signs.add("count")
    assert signs == {*SIGNS, "or", "count"}


def _check_count(made: Example) -> None:
    thought = made.answer["reasoning_content"].split("\n")
    assert int(re.findall(r"\d+", made.answer["content"])[0]) == len(thought)
    assert made.request["messages"][-1]["content"].count(",") == len(thought) - 1
    assert [line.split()[0] for line in thought] == [str(number) for number in range(1, len(thought) + 1)]


def test_what_is_worked_out_is_the_answer() -> None:
    thoughts = [example(rng("train", "arithmetic", index), 0).answer for index in range(200)]
    worked = [answer for answer in thoughts if "\n" in answer.get("reasoning_content", "") and "=" in answer["content"]]
    assert len(worked) > 50
    for answer in worked:
        assert int(answer["reasoning_content"].split("\n")[-1]) == int(re.findall(r"\d+", answer["content"])[-1])
