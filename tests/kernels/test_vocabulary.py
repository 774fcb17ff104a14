from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from kernels.vocabulary import compress_vocabulary

PIECES = ["<pad>", "Hello", "hello", "HÉLLO", " ", "  ", "\n\t", " hello", "\u00a0", "ﬁ", "fi", "é", "\u0301"]
PIECES += ["<0xE2>", "<0xE3>"]


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
    assert ids["\u0301"] not in (ids[" "], ids["é"])  # normalises to nothing: kept as it is
