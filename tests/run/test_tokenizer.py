"""The bundled tokenizer: one token for each word and phrase of the corpus, the same in both libraries that read it."""

from __future__ import annotations

import random
from pathlib import Path

import deepseek_recipe
import pytest
from tokenizers import Tokenizer

from run.checkpoint import VOCAB_SIZE
from run.corpus import phrases, whole
from run.tokenizer import train


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(VOCAB_SIZE)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text).ids]


def test_words_and_phrases_are_whole(tokenizer: Tokenizer) -> None:
    assert [text for text in whole() if len(tokenizer.encode(text).ids) != 1] == []


def test_a_fact_is_ten_tokens(tokenizer: Tokenizer) -> None:
    expected = ["The", " code", " of", " Marta", " is", " ", "4", "8", "2", "1", ".\n", "Karl"]
    assert pieces(tokenizer, "The code of Marta is 4821.\nKarl") == expected


def test_words_are_the_same_in_json_as_at_the_start_of_a_sentence(tokenizer: Tokenizer) -> None:
    expected = ['{"', "name", '": "', "Marta", '", "', "age", '": ', "3", "1", '}, {"', "name"]
    assert pieces(tokenizer, '{"name": "Marta", "age": 31}, {"name') == expected


def test_both_libraries_cut_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    official, chance = deepseek_recipe.Tokenizer.from_file(str(path)), random.Random(3)
    parts = [*"abXY  \n\n.,:;\"'{}[]<>()_-=019é你あ🙂\t\r!?&^|~", *phrases(), " Marta", "Oslo", "get_time"]
    for _ in range(300):
        text = "".join(chance.choices(parts, k=20))
        assert list(official.encode(text)) == tokenizer.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_vocabulary_too_small_for_the_words_is_refused() -> None:
    with pytest.raises(ValueError, match="words and phrases do not fit into 700 ids"):
        train(700)
