"""The bundled tokenizer: byte-level BPE trained on run/corpus.py, with DeepSeek's cuts and control tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from run.corpus import texts

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
IMAGE = "<｜image｜>"
NOISE = "<｜fim▁hole｜>"  # what draft stages embed for the tokens they are to propose; no conversation holds it

# Control tokens after the ordinary vocabulary, in the official order (V4.1 names); True where decoding may skip them.
CONTROL = (
    (SYSTEM, True),
    (NOISE, False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<|EOT|>", False),
    ("<think>", False),
    ("</think>", False),
    ("｜DSML｜", False),
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

# DeepSeek's cut of text before merging: digits by three, CJK runs, then words, punctuation and spaces.
_CUTS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def train(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: BOS, EOS, pad, bytes, merges, control tokens last.

    The same corpus and `tokenizers` version give the same tokenizer. No normaliser, no BOS added: templates write it.
    """
    tokenizer = Tokenizer(BPE())
    cuts = [Split(Regex(pattern), behavior="isolated") for pattern in _CUTS]
    tokenizer.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CONTROL),
        special_tokens=[_added(text, special=True) for text in (BOS, EOS, PAD)],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    for text, special in CONTROL:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([_added(text, special=special)])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)
