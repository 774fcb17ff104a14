"""Recall: a note of many facts among filler, and questions about single facts anywhere in it.

The answer is the fact's own sentence, so that looking up its first words finds the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from run.train.example import Example
from run.train.words import ADJECTIVES, ANIMALS, CITIES, COLOURS, FOODS, JOBS, NAMES, PLACES, THINGS, VERBS, invented

_TOKENS_PER_SENTENCE = 8.6
_OUTSIDE_TOKENS = 20
"""Of a prompt that are not its note: the template and the questions."""

_MOST_QUESTIONS = 10
_PART_FACTS = 0.55
"""Of the sentences, while there are keys left."""

_PART_INVENTED = 0.05
"""Of the people: names that are no token, so that names are copied in pieces too."""

_INTRODUCTIONS = ("Note:\n", "Read this note.\n", "Remember this.\n")
_ASIDES = ("Read the note and answer.", "Answer from the note.", "")


class Kind(NamedTuple):
    """A kind of fact: its sentence and its question around a subject, and what its value may be."""

    sentence: str
    question: str
    values: tuple[str, ...]
    num_digits: int = 0

    def value(self, rng: random.Random) -> str:
        """One of the values, or a number of up to `num_digits` digits."""
        if self.values:
            return rng.choice(self.values)
        num_digits = rng.randint(2, self.num_digits)
        return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))


class Fact(NamedTuple):
    """One fact as it stands in the note, and its question."""

    sentence: str
    question: str


def _named(attribute: str, values: tuple[str, ...], num_digits: int = 0, article: str = "") -> Kind:
    subject = f"The {attribute} of {article}{{}} is"
    return Kind(subject + " {}.", f"What is the {attribute} of {article}{{}}?", values, num_digits)


_OWNED = tuple(f"{colour} {thing}" for colour in COLOURS if colour != "orange" for thing in THINGS)  # no "a orange"
_OF_PEOPLE = (
    _named("code", (), 4),
    _named("number", (), 4),
    _named("room", (), 3),
    _named("age", (), 2),
    _named("job", JOBS),
    _named("friend", NAMES),
    Kind("{} lives in {}.", "Where does {} live?", CITIES),
    Kind("{} likes {}.", "What does {} like?", FOODS),
    Kind("{} has a {}.", "What does {} have?", _OWNED),
)
_OF_THINGS = (
    _named("colour", COLOURS, article="the "),
    _named("price", (), 3, article="the "),
    _named("code", (), 4, article="the "),
    _named("owner", NAMES, article="the "),
    Kind("The {} is in the {}.", "Where is the {}?", PLACES),
)
_KEYS = tuple((kind, name) for kind in _OF_PEOPLE for name in NAMES) + tuple(
    (kind, thing) for kind in _OF_THINGS for thing in THINGS
)


def example(rng: random.Random, num_tokens: int) -> Example:
    """A note in the first user message or in the system prompt, and one question to ten about it."""
    most = _MOST_QUESTIONS if num_tokens > 400 else 6  # a long note costs much, so more is learnt from it
    num_questions = 1 if rng.random() < 0.3 else rng.randint(2, most)
    room = num_tokens - _OUTSIDE_TOKENS - 22 * num_questions
    lines, facts = _note(rng, max(4, round(room / _TOKENS_PER_SENTENCE)))
    asked = rng.sample(facts, min(num_questions, len(facts)))
    is_thinking = rng.random() < 0.1
    messages = [*_messages(rng, lines, [fact for _, fact in asked])]
    index, last = asked[-1]
    answer: dict[str, Any] = {"role": "assistant", "content": last.sentence}
    if is_thinking:
        answer["reasoning_content"] = thought(last.question)
    request = {"messages": messages, "thinking": {"type": "enabled" if is_thinking else "disabled"}}
    return Example("recall", request, answer, depth=index / max(1, len(lines) - 1))


def thought(question: str) -> str:
    """The one line that goes before an answer in thinking mode: it follows from the question alone."""
    return f"The question is: {question} I look in the note."


def _messages(rng: random.Random, lines: list[str], asked: list[Fact]) -> Iterator[dict[str, Any]]:
    """The conversation up to its last question. `asked` are answered in turn, all but the last."""
    note = rng.choice(_INTRODUCTIONS) + rng.choice(("\n", "\n", " ")).join(lines)
    opening = ""
    if rng.random() < 0.3:
        yield {"role": "system", "content": "\n\n".join(filter(None, (rng.choice(_ASIDES), note)))}
    else:
        opening = note + "\n\n"
        if rng.random() < 0.2:
            yield {"role": "system", "content": "You are a helpful assistant."}
    for turn, fact in enumerate(asked):
        yield {"role": "user", "content": (opening if turn == 0 else "") + fact.question}
        if turn < len(asked) - 1:
            yield {"role": "assistant", "content": fact.sentence}


def _note(rng: random.Random, num_sentences: int) -> tuple[list[str], list[tuple[int, Fact]]]:
    """The sentences of a note, and its facts with the places where they stand; each is asked for unmistakably."""
    keys = iter(rng.sample(_KEYS, len(_KEYS)))
    lines, facts, asked_for = list[str](), list[tuple[int, Fact]](), set[str]()
    certain = rng.randrange(num_sentences)
    for place in range(num_sentences):
        key = next(keys, None) if place == certain or rng.random() < _PART_FACTS else None
        fact = _fact(rng, *key) if key else None
        if fact is None or fact.question in asked_for:
            lines.append(filler(rng))
            continue
        asked_for.add(fact.question)
        facts.append((place, fact))
        lines.append(fact.sentence)
    return lines, facts


def _fact(rng: random.Random, kind: Kind, subject: str) -> Fact:
    if subject in NAMES and rng.random() < _PART_INVENTED:
        subject = invented(rng)
    return Fact(kind.sentence.format(subject, kind.value(rng)), kind.question.format(subject))


def filler(rng: random.Random) -> str:
    """A sentence that answers no question."""
    form = rng.randrange(4)
    if form == 0:
        return f"A {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} {rng.choice(VERBS)} in the {rng.choice(PLACES)}."
    if form == 1:
        return f"It was {rng.choice(ADJECTIVES)} and {rng.choice(ADJECTIVES)} near the {rng.choice(PLACES)}."
    if form == 2:
        return f"{rng.choice(NAMES)} and {rng.choice(NAMES)} went to the {rng.choice(PLACES)} again."
    return f"This {rng.choice(THINGS)} was {rng.choice(ADJECTIVES)} and came from {rng.choice(CITIES)}."
