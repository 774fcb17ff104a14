"""Each transformation is what its request says, worked out here from the request's own text."""

from __future__ import annotations

import re

from run.train.seeds import rng
from run.train.tasks.transform import example
from run.train.words import LEXICON


def answer_to(question: str) -> str:
    """The right answer, by the words of the request."""
    ask, text = re.split(r":[ \n]", question, maxsplit=1)
    words = text.split(", ")
    if ask in ("Repeat", "Copy", "Say"):
        return text
    if ask == "Reverse the list":
        return ", ".join(words[::-1])
    if ask == "Write the list as lines":
        return "\n".join(f"- {word}" for word in words)
    if found := re.fullmatch(r"Replace (\w+) with (\w+)", ask):
        return re.sub(rf"\b{found[1]}\b", found[2], text)
    found = re.fullmatch(r"Give the (first|last) (?:word|(\d) words) of the list", ask)
    assert found is not None, question
    num = int(found[2] or 1)
    return ", ".join(words[:num] if found[1] == "first" else words[-num:])


def test_answers_are_right_and_texts_are_of_many_lengths() -> None:
    lengths = set()
    for index in range(400):
        made = example(rng("train", "transform", index), 100)
        (message,) = made.request["messages"]
        assert made.answer["content"] == answer_to(message["content"])
        lengths.add(len(message["content"].split()))
    assert min(lengths) < 6 and max(lengths) > 50


def test_some_words_are_of_no_lexicon() -> None:
    texts = [example(rng("train", "transform", index), 100).answer["content"] for index in range(200)]
    words = re.findall(r"[A-Za-z]+", " ".join(texts))
    unknown = [word for word in words if word not in LEXICON]
    assert 0.005 < len(unknown) / len(words) < 0.1
