"""Held-out wordings are never trained, and are answered as the trained ones are."""

from __future__ import annotations

import re

from run.train.seeds import rng
from run.train.tasks.about import QUESTIONS, example, held_out


def _plain(text: str) -> str:
    """Without case and punctuation: training varies both."""
    return re.sub(r"\W+", " ", text).strip().lower()


def test_held_out_wordings_are_never_trained() -> None:
    trained = [_plain(wording) for question in QUESTIONS for wording in question.trained]
    kept_back = [_plain(wording) for question in QUESTIONS for wording in question.held_out]
    assert len(set(trained + kept_back)) == len(trained) + len(kept_back)
    assert all(len(question.trained) >= 3 and question.held_out for question in QUESTIONS)
    made = [example(rng("train", "about", index), 0).request["messages"] for index in range(1000)]
    asked = {_plain(message["content"]) for messages in made for message in messages if message["role"] == "user"}
    assert not asked & set(kept_back) and len(asked & set(trained)) > len(trained) * 0.8


def test_held_out_questions_have_the_trained_answers() -> None:
    answers = {_plain(wording): question.answer for question in QUESTIONS for wording in question.held_out}
    for index in range(100):
        made = held_out(rng("held-out", "about", index), 0)
        assert made.answer["content"] == answers[_plain(made.request["messages"][-1]["content"])]


def test_what_nobody_told_is_not_known() -> None:
    made = [example(rng("train", "about", index), 0).answer["content"] for index in range(400)]
    assert 20 < sum(answer.startswith("I do not know") for answer in made) < 80
