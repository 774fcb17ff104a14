"""Images hold the figures that answers name, where they say, and pass the service as they are."""

from __future__ import annotations

import base64
import io
import random

import numpy as np
import pytest
from PIL import Image

from run.train.seeds import rng
from run.train.tasks.picture import COLOURS, PLACES, SHAPES, Figure, draw, example


def _pixels(image: Image.Image, colour: str) -> np.ndarray:
    return (np.asarray(image) == np.asarray(COLOURS[colour])).all(-1)


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_figures_stay_in_their_places(place: int) -> None:
    for index, shape in enumerate(SHAPES):
        mask = _pixels(draw(random.Random(index), [Figure(shape, "red", place)]), "red")
        height, width = (side // 3 for side in mask.shape)
        row, column = divmod(place, 3)
        inside = mask[row * height : (row + 1) * height, column * width : (column + 1) * width]
        assert inside.sum() == mask.sum() > inside.size / 20


def test_shapes_differ_by_what_they_fill() -> None:
    filled = {}
    for shape in SHAPES:
        mask = _pixels(draw(random.Random(1), [Figure(shape, "blue", 4)]), "blue")
        rows, columns = np.nonzero(mask)
        filled[shape] = mask.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
    assert filled["square"] == 1 > filled["circle"] > 0.7 > filled["cross"] > filled["triangle"] > 0.45


def test_answers_name_what_is_there() -> None:
    asked = set()
    for index in range(100):
        made = example(rng("train", "picture", index), 0)
        parts = {part["type"]: part for part in made.request["messages"][0]["content"]}
        image = Image.open(io.BytesIO(base64.b64decode(parts["image_url"]["image_url"]["url"].partition(",")[2])))
        assert all(side % 42 == 0 for side in image.size)
        answer, question = made.answer["content"], parts["text"]["text"]
        values = {value for _, value in image.getcolors() or ()}
        shown = {colour for colour, value in COLOURS.items() if value in values}
        named = {colour for colour in COLOURS if colour in answer}
        assert named <= shown and (named == shown or "see" not in question)
        asked.add(question.split()[0])
    assert asked == {"What", "Describe", "How", "Which", "Where", "In"}
