"""Naming colour, shape and place of one to three figures in a generated image.

Images are 126 to 210 pixels a side, white or nearly so, in a grid of three by three places with a figure in some. What
is asked of one figure is clear: its shape is the only one of its kind then.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from run.train.example import Example

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 20),
    "purple": (150, 50, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("at the left", "in the centre", "at the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
_SIDES = (126, 126, 126, 168, 210)
"""Multiples of what one image token covers, so that the service takes the image as it is."""
_ASKS = {
    "all": ("What is in the picture?", "What do you see?", "Describe the picture."),
    "number": ("How many figures are there?", "How many figures are in the picture?"),
    "colour": ("What colour is the {}?", "Which colour has the {}?"),
    "place": ("Where is the {}?", "In which place is the {}?"),
    "shape": ("What is {}?", "Which figure is {}?"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `place` is an index of PLACES."""

    shape: str
    colour: str
    place: int

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


def example(rng: random.Random, num_tokens: int) -> Example:
    """An image with a question, of a fixed size: 14 to 32 tokens of image."""
    kind = rng.choice(("all", "all", "number", "colour", "place", "shape"))
    number = rng.choice((1, 2, 2, 3) if kind != "number" else (1, 2, 3))
    shapes = rng.choices(SHAPES, k=number) if kind in ("all", "number") else rng.sample(SHAPES, number)
    places = sorted(rng.sample(range(len(PLACES)), number))
    figures = [Figure(shape, rng.choice(list(COLOURS)), place) for shape, place in zip(shapes, places, strict=True)]
    figure = rng.choice(figures)
    asked = rng.choice(_ASKS[kind]).format(PLACES[figure.place] if kind == "shape" else figure.shape)
    answer = {"role": "assistant", "content": _answer(kind, figures, figure)}
    image = {"type": "image_url", "image_url": {"url": _data_url(draw(rng, figures))}}
    content = [image, {"type": "text", "text": asked}]
    if rng.random() < 0.2:
        content.reverse()
    request: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}}
    return Example("picture", request, answer)


def draw(rng: random.Random, figures: list[Figure]) -> Image.Image:
    """An RGB image of these figures; its sides, its tint and what each figure fills of its place are random."""
    width, height = rng.choice(_SIDES), rng.choice(_SIDES)
    image = Image.new("RGB", (width, height), tuple(rng.randint(235, 255) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for figure in figures:
        row, column = divmod(figure.place, 3)
        size = min(width, height) // 3 * rng.randint(60, 90) // 100
        left = width // 3 * column + rng.randint(0, width // 3 - size)
        top = height // 3 * row + rng.randint(0, height // 3 - size)
        _fill(pen, figure.shape, (left, top, left + size - 1, top + size - 1), COLOURS[figure.colour])
    return image


def _fill(pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    if shape == "circle":
        pen.ellipse(box, colour)
    elif shape == "square":
        pen.rectangle(box, colour)
    elif shape == "triangle":
        pen.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], colour)
    else:
        third = (right - left) // 3
        pen.rectangle((left + third, top, right - third, bottom), colour)
        pen.rectangle((left, top + third, right, bottom - third), colour)


def _answer(kind: str, figures: list[Figure], figure: Figure) -> str:
    if kind == "number":
        return "There is 1 figure." if len(figures) == 1 else f"There are {len(figures)} figures."
    if kind == "colour":
        return f"The {figure.shape} is {figure.colour}."
    if kind == "place":
        return f"The {figure.shape} is {PLACES[figure.place]}."
    if kind == "shape":
        return f"{str(figure).capitalize()} is {PLACES[figure.place]}."
    told = [f"{figure} {PLACES[figure.place]}" for figure in figures]
    sentence = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    return f"{sentence.capitalize()}."


def _data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
