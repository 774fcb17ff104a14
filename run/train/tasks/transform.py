"""Copying and simple transformations of a given text: repeat, reverse, replace, first and last words, lines."""

from __future__ import annotations

import random
from collections.abc import Callable

from run.train.example import Example
from run.train.words import LEXICON, SPOKEN, invented

_FEW = 8
"""Words of a list that is turned around."""

_MOST_WORDS = 60


def example(rng: random.Random, num_tokens: int) -> Example:
    """One request with its text. `num_tokens` bounds the text; a thought never goes before the answer."""
    form = rng.choice(_FORMS)
    question, answer = form(rng, max(3, min(_MOST_WORDS, num_tokens - 16)))
    request = {"messages": [{"role": "user", "content": question}], "thinking": {"type": "disabled"}}
    return Example("transform", request, {"role": "assistant", "content": answer})


def _word(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.05:
        return invented(rng)
    return str(rng.randrange(100)) if chance < 0.15 else rng.choice(LEXICON)


def _list(rng: random.Random, most: int) -> list[str]:
    """Two words or more, all different: in a list with repetitions it would be unclear which one comes next."""
    return rng.sample(SPOKEN, rng.randint(2, min(most, _FEW)))


def _repeat(rng: random.Random, most: int) -> tuple[str, str]:
    # Short texts are as frequent as long ones.
    longest = rng.randint(3, most)
    words = [rng.choice(SPOKEN), *(_word(rng) for _ in range(rng.randint(2, longest - 1)))]
    text = " ".join(words) + rng.choice(("", "."))
    return rng.choice(("Repeat:", "Copy:", "Say:")) + rng.choice((" ", "\n")) + text, text


def _reverse(rng: random.Random, most: int) -> tuple[str, str]:
    words = _list(rng, most)
    return f"Reverse the list: {', '.join(words)}", ", ".join(reversed(words))


def _replace(rng: random.Random, most: int) -> tuple[str, str]:
    words = rng.sample(SPOKEN, rng.randint(3, max(3, most // 3)) + 1)
    new = words.pop()
    old = rng.choice(words)
    text = " ".join(words)
    return f"Replace {old} with {new}: {text}", " ".join(new if word == old else word for word in words)


def _ends(rng: random.Random, most: int) -> tuple[str, str]:
    words = _list(rng, most)
    num = rng.randint(1, len(words) - 1)
    end = rng.choice(("first", "last"))
    kept = words[:num] if end == "first" else words[-num:]
    noun = "word" if num == 1 else f"{num} words"
    return f"Give the {end} {noun} of the list: {', '.join(words)}", ", ".join(kept)


def _lines(rng: random.Random, most: int) -> tuple[str, str]:
    words = _list(rng, most)
    return f"Write the list as lines: {', '.join(words)}", "\n".join(f"- {word}" for word in words)


# Copying is what the others build on.
_FORMS: tuple[Callable[[random.Random, int], tuple[str, str]], ...] = (
    *(_repeat,) * 3,
    _reverse,
    _replace,
    _ends,
    _lines,
)
