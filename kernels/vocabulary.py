"""Engram's compressed vocabulary: token ids that read alike share an id (spec §7.1)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, normalizers

from kernels.checkpoint import CheckpointError
from kernels.config import ModelConfig
from kernels.keys import parse

_MAP = "engram_token_map.json"
_TOKENIZER = "tokenizer.json"
_LONE_SPACE = "\ue000"  # private use: protects a token that is one space from the strip behind it


class TokenMap(NamedTuple):
    """`ids` [vocab] int64: token id -> compressed id; `num_ids` of them; `pad` is the compressed padding id."""

    ids: torch.Tensor
    num_ids: int
    pad: int


def compress_vocabulary(tokenizer_path: str | Path) -> list[int]:
    """Compressed id of every token of a tokenizer.json, numbered in the order of first appearance.

    Raises CheckpointError when it is none.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # the library raises no class of its own
        raise CheckpointError(f"{tokenizer_path}: not a tokenizer: {error}") from None
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    compressed = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # Bytes that are no text on their own stay apart by their raw piece.
        piece = tokenizer.id_to_token(token) or ""
        key = piece if "\ufffd" in text else normalizer.normalize_str(text) or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    return compressed


def load_token_map(folder: str | Path, config: ModelConfig) -> TokenMap:
    """From engram_token_map.json of a checkpoint folder, else computed from its tokenizer.json.

    Raises CheckpointError when neither is there, what is there is none, or it does not fit the configuration.
    """
    path = Path(folder) / _MAP
    if path.exists():
        ids = _read_map(path)
    else:
        path = Path(folder) / _TOKENIZER
        if not path.exists():
            raise CheckpointError(f"{folder}: neither {_MAP} nor {_TOKENIZER} is there")
        ids = compress_vocabulary(path)
    num_ids = max(ids, default=-1) + 1
    if len(ids) > config.vocab_size or num_ids != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: {len(ids)} tokens in {num_ids} classes, but config.json says"
            f" vocab_size {config.vocab_size}, engram_compressed_vocab_size {config.engram_compressed_vocab_size}"
        )
    # Ids beyond the tokenizer can be embedded but never come from text; they stay outside every class but the pad's.
    pad = ids[config.engram_pad_token_id]
    filled = ids + [pad] * (config.vocab_size - len(ids))
    return TokenMap(torch.tensor(filled), num_ids, pad)


def _read_map(path: Path) -> list[int]:
    try:
        content = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no token_map: {error}") from None
    ids = content.get("token_map") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise CheckpointError(f"{path}: no token_map: a list of one compressed id per token")
    return ids
