"""Sums, differences, products, comparisons and counts, within a stated range.

With thinking: sums and differences of 0 to 999 (no negative results) column by column, which of two of 0 to 999 is
larger, digit by digit, and lists of up to 12 things, numbered one by one. Without: sums and differences of 0 to 10 and
products of 0 to 12, which are tables to be known by heart; of the others there are far more than are ever seen.
"""

from __future__ import annotations

import random
from typing import Any

from run.train.example import Example
from run.train.words import FOODS, THINGS

_LARGEST = 999
_LARGEST_AT_SIGHT = 10
_LARGEST_FACTOR = 12
_MOST_THINGS = 12
_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_ASKS = ("What is {}?", "{}", "Compute {}.", "{} =", "How much is {}?")


def example(rng: random.Random, num_tokens: int) -> Example:
    """One question with its answer, of a fixed size."""
    kinds = (_in_columns, _in_columns, _in_columns, _at_sight, _product, _comparison, _count)
    question, reasoning, content = rng.choice(kinds)(rng)
    request: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    request |= {"thinking": {"type": "enabled" if reasoning else "disabled"}}
    answer = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    return Example("arithmetic", request, answer)


def columns(a: int, sign: str, b: int) -> str:
    """The thought for a sum or a difference: both numbers in three digits, then from the right a line per column.

    After the sign of equality come two digits, of which the first is the carry (or what was borrowed): 8+5+1=14 and
    3-5-0=18. The last line is the result in four digits, so that each digit stands at a fixed distance of its source.
    """
    lines, carry, result = [f"{a:03} {sign} {b:03}"], 0, ""
    for place in range(3):
        left, right = a // 10**place % 10, b // 10**place % 10
        total = left + right + carry if sign == "+" else left - right - carry
        before, carry, digit = carry, abs(total // 10), total % 10
        lines.append(f"{left}{sign}{right}{sign}{before}={carry}{digit}")
        result = f"{digit}{result}"
    return "\n".join([*lines, f"{carry}{result}"])


def _in_columns(rng: random.Random) -> tuple[str, str, str]:
    a, b = _number(rng), _number(rng)
    sign = rng.choice("+-")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    return _ask(rng, a, sign, b), columns(a, sign, b), _equation(a, sign, b)


def _at_sight(rng: random.Random) -> tuple[str, str, str]:
    a, b, sign = rng.randint(0, _LARGEST_AT_SIGHT), rng.randint(0, _LARGEST_AT_SIGHT), rng.choice("+-")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    return _ask(rng, a, sign, b), "", _equation(a, sign, b)


def _product(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.randint(0, _LARGEST_FACTOR), rng.randint(0, _LARGEST_FACTOR)
    return _ask(rng, a, "*", b), "", _equation(a, "*", b)


def comparison(a: int, b: int) -> str:
    """The thought that compares two numbers: both in three digits, then digit by digit until two of them differ."""
    lines = [f"{a:03} {b:03}"]
    for left, right in zip(*lines[0].split(), strict=True):
        lines.append(f"{left}{'<' if left < right else '>' if left > right else '='}{right}")
        if left != right:
            break
    return "\n".join(lines)


def _comparison(rng: random.Random) -> tuple[str, str, str]:
    a, b = _number(rng), _number(rng)
    if a == b:
        b = (a + 1) % (_LARGEST + 1)
    word, pick = rng.choice((("larger", max), ("smaller", min)))
    question = rng.choice(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?")).format(w=word, a=a, b=b)
    return question, comparison(a, b), f"Of {a} and {b}, {pick(a, b)} is {word}."


def _count(rng: random.Random) -> tuple[str, str, str]:
    number = rng.randint(1, _MOST_THINGS)
    things = rng.sample(THINGS + FOODS, number)
    ask = rng.choice(("How many things are in this list: {}?", "Count the things: {}.", "How many are these? {}"))
    reasoning = "\n".join(f"{position} {thing}" for position, thing in enumerate(things, 1))
    content = "There is 1 thing." if number == 1 else f"There are {number} things."
    return ask.format(", ".join(things)), reasoning, content


def _number(rng: random.Random) -> int:
    """As many of one and two digits as people ask about; three digits are half of them."""
    return rng.randint(0, rng.choice((9, 99, _LARGEST, _LARGEST, _LARGEST)))


def _ask(rng: random.Random, a: int, sign: str, b: int) -> str:
    spelling = rng.choice((sign, sign, _WORDS[sign]))
    return rng.choice(_ASKS).format(f"{a} {spelling} {b}")


def _equation(a: int, sign: str, b: int) -> str:
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"{a} {sign} {b} = {result}."
