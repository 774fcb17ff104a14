"""The bundled tokenizer: byte-level BPE made from run/corpus.py, with DeepSeek's control tokens."""

from __future__ import annotations

import json
import re

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from run.corpus import phrases, texts, whole

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, ASSISTANT, THINK_END, DSML = "<｜System｜>", "<｜Assistant｜>", "</think>", "｜DSML｜"
IMAGE = "<｜image｜>"
NOISE = "<｜fim▁hole｜>"  # what draft stages embed for the tokens they are to propose; no conversation holds it

# Control tokens after the ordinary vocabulary, in the official order (V4.1 names); True where decoding may skip them.
CONTROL = (
    (SYSTEM, True),
    (NOISE, False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    (ASSISTANT, False),
    ("<|EOT|>", False),
    ("<think>", False),
    (THINK_END, False),
    (DSML, False),
    ("<｜latest_reminder｜>", False),
    (IMAGE, False),
    ("<｜/polygon｜>", True),
    ("<｜polygon｜>", True),
    ("<｜/point｜>", True),
    ("<｜point｜>", True),
    ("<｜/box｜>", True),
    ("<｜box｜>", True),
    ("<｜/ref｜>", True),
    ("<｜ref｜>", True),
)

# DeepSeek's cut of text before merging, changed where it makes small models fail. Every digit stands alone, so that
# numbers are computed digit by digit, and each is copied and carried with the same ten tokens. Words never begin with
# a mark, so that a word in JSON or in quotes is the same token as at the start of a sentence.
_CUTS = (
    "[A-Za-z]+(?:_[A-Za-z0-9]+)+",  # names of tools
    r"""(?:["\[\]{}]|, ?["\[{])(?:[,:] |["\[\]{},:])*""",  # the frame of JSON
    r"\p{N}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r""" ?[\p{P}\p{S}&&[^"\[\]{}<]]+[\r\n]*""",
    r" ?[<\[\]{}\"][\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def train(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: BOS, EOS, pad, bytes, merges, whole words and phrases, control tokens.

    A word of run/corpus.py is one token and needs no merges for its parts (`ignore_merges`); merges are for all other
    text. The same corpus and `tokenizers` version give the same tokenizer. No normaliser, no BOS added: templates
    write it. Raises ValueError when the words alone are too many.
    """
    alphabet = sorted(ByteLevel.alphabet())
    words = [piece for piece in map(_bytes_of, whole()) if len(piece) > 1]
    num_free = vocab_size - len(CONTROL) - 3 - len(alphabet)
    merges = _merges(num_free, frozenset(words))
    made = dict.fromkeys(left + right for left, right in merges)
    while len(made.keys() | set(words)) > num_free:
        if not merges:
            raise ValueError(f"{len(words)} words and phrases do not fit into {vocab_size} ids")
        made.popitem()
        merges.pop()
    pieces = (BOS, EOS, PAD, *alphabet, *dict.fromkeys((*made, *words)))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = _cutting(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.add_special_tokens([_added(text, special=True) for text in (BOS, EOS, PAD)])
    for text, special in CONTROL:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([_added(text, special=special)])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def _cutting(model: BPE) -> Tokenizer:
    """A tokenizer that cuts text and knows no control token yet."""
    tokenizer = Tokenizer(model)
    split = Split(Regex("|".join((_phrases(), *_CUTS))), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    return tokenizer


def _phrases() -> str:
    """The pattern of the phrases. A look at two characters spares most words the long list: twice as fast."""
    texts = phrases()
    first = "".join(sorted({re.escape(text[0]) for text in texts} - {re.escape(" ")}))
    second = "".join(sorted({re.escape(text[1]) for text in texts if text[0] == " "}))
    return f"(?=[{first}]| [{second}])(?:{'|'.join(map(re.escape, texts))})"


def _merges(num: int, words: frozenset[str]) -> list[tuple[str, str]]:
    """The first `num` merges that English is learnt with, the words that are whole anyway left out."""
    tokenizer = _cutting(BPE())
    trainer = BpeTrainer(vocab_size=256 + num, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((text for text in texts() if _bytes_of(text) not in words), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _bytes_of(text: str) -> str:
    """The text in the characters that stand for its bytes in a vocabulary."""
    return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)
