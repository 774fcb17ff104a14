from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kernels.checkpoint import CheckpointError
from kernels.config import ModelConfig
from kernels.vocabulary import compress_vocabulary, load_token_map
from tests.kernels.conftest import GOLDEN

PIECES = ["<pad>", "Hello", "hello", "HÉLLO", " ", "  ", "\n\t", " hello", "\u00a0", "ﬁ", "fi", "é", "\u0301"]
PIECES += ["<0xE2>", "<0xE3>", "he llo", "he \t llo", "HE\nllo ", "he", "\uff48\uff45", "\ufffd", "\ufffdA", "\ufffda"]


def test_tokens_that_read_alike_share_an_id(tmp_path: Path) -> None:
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = dict(zip(PIECES, compress_vocabulary(tmp_path / "tokenizer.json"), strict=True))
    assert ids["<pad>"] == 0 and ids["Hello"] == 1  # numbered by first appearance
    assert ids["Hello"] == ids["hello"] == ids["HÉLLO"] == ids[" hello"]
    assert ids[" "] == ids["  "] == ids["\n\t"] == ids["\u00a0"] != ids["hello"]
    assert ids["ﬁ"] == ids["fi"]
    assert ids["<0xE2>"] != ids["<0xE3>"]  # bytes that are no text alone
    assert ids["he llo"] == ids["he \t llo"] == ids["HE\nllo "] not in (ids["hello"], ids["he"])
    assert ids["\uff48\uff45"] == ids["he"]  # compatibility forms
    assert len({ids["\ufffd"], ids["\ufffdA"], ids["\ufffda"]}) == 3  # with a replacement character: as it is
    assert ids["\u0301"] not in (ids[" "], ids["é"])  # normalises to nothing: kept as it is


def test_special_tokens_and_byte_level_pieces_are_read_as_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|End|>", "<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = compress_vocabulary(tmp_path / "tokenizer.json")

    def of(piece: str) -> int:
        number: int = ids[tokenizer.token_to_id(piece)]
        return number

    assert len(ids) == 258
    assert of("<|End|>") == of("<|end|>")  # kept when decoded, then compared as text
    assert of("A") == of("a") and of("\u0120") == of("\u010a") == of("\u0109")  # space, line feed, tab
    lone = [piece for piece in alphabet if 0xA0 < ord(piece) < 0x100]
    assert len({of(piece) for piece in lone}) == len(lone) == 94  # bytes that are no text alone


@pytest.mark.parametrize("text", ["garbage", "[" * 100_000, "{}"])
def test_what_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: "):
        load_token_map(tmp_path, ModelConfig.from_folder(GOLDEN / "mini"))


NO_MAPS = [f'{{"token_map": {value}}}' for value in ("3", "[]", '["a"]', "[-1]", "{}")]


@pytest.mark.parametrize("value", ["[" * 100_000, "[]", "{}", *NO_MAPS])
def test_what_is_no_token_map_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "engram_token_map.json").write_text(value)
    with pytest.raises(CheckpointError, match=r"engram_token_map\.json: no token_map"):
        load_token_map(tmp_path, ModelConfig.from_folder(GOLDEN / "mini"))
