"""Recall: the answer stands in the note once, at the depth that is said, and the question fits no other sentence."""

from __future__ import annotations

from typing import Any

import pytest

from run.train.example import Example
from run.train.seeds import rng
from run.train.tasks.recall import example, thought


def note_of(made: Example) -> list[str]:
    """The sentences of the note, without what introduces it."""
    (text,) = (message["content"] for message in made.request["messages"] if ".\n" in _text(message))
    body = text.split("Note:\n")[-1].split("Read this note.\n")[-1].split("Remember this.\n")[-1].split("\n\n")[0]
    return [sentence + "." for sentence in body.replace("\n", " ").removesuffix(".").split(". ")]


def _text(message: dict[str, Any]) -> str:
    text: str = message["content"]
    return text.replace("Note:", ".")


def turns_of(made: Example) -> list[tuple[str, str]]:
    """Each question with its answer."""
    said = [message["content"] for message in made.request["messages"] if message["role"] != "system"]
    said += [made.answer["content"]]
    return [(question.split("\n\n")[-1], answer) for question, answer in zip(said[::2], said[1::2], strict=True)]


@pytest.mark.parametrize("num_tokens", [100, 300, 2000])
def test_each_question_has_one_answer_in_the_note(num_tokens: int) -> None:
    for index in range(40):
        made = example(rng("train", "recall", index), num_tokens)
        sentences, turns = note_of(made), turns_of(made)
        for question, answer in turns:
            assert sentences.count(answer) == 1
            key = answer.removesuffix(".").rsplit(" ", 1)[0]
            if question.startswith("What is the"):
                assert key == f"The {question[len('What is the ') : -1]} is"
                assert [sentence for sentence in sentences if sentence.startswith(f"{key} ")] == [answer]
        assert made.depth == sentences.index(turns[-1][1]) / (len(sentences) - 1)


def test_lengths_depths_and_numbers_of_questions_are_spread() -> None:
    made = [example(rng("train", "recall", index), 1000) for index in range(300)]
    assert {len(turns_of(one)) for one in made} == set(range(1, 11))
    short = [example(rng("train", "recall", index), 300) for index in range(60)]
    assert {len(turns_of(one)) for one in short} == set(range(1, 7))
    depths = [one.depth or 0.0 for one in made]
    assert all(sum(low / 10 <= depth <= low / 10 + 0.1 for depth in depths) > 15 for low in range(10))
    assert any(one.request["messages"][0]["role"] == "system" for one in made)


def test_a_thought_follows_from_its_question() -> None:
    made = [example(rng("train", "recall", index), 200) for index in range(100)]
    thinking = [one for one in made if one.request["thinking"]["type"] == "enabled"]
    assert 2 < len(thinking) < 25
    for one in thinking:
        assert one.answer["reasoning_content"] == thought(turns_of(one)[-1][0])
