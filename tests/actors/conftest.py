"""One model card and its tokenizer for all tests of recipe and gateway."""

from __future__ import annotations

import pytest

from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from tests.actors.edge import IMAGE_TOKEN, make_card


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return make_card(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Of a checkpoint that sees images."""
    return make_card(tmp_path_factory.mktemp("sighted"), image_token=IMAGE_TOKEN)


@pytest.fixture(scope="session")
def converter(card: ModelCard) -> Converter:
    return Converter(card)
