"""Grammars: what the whole output of a request has to be, one text in the Lark of llguidance.

The recipe writes and tries them, decode replicas follow them. The parts of an output between control tokens are made of
other tokens: no control token is part of any text here, they stand in a grammar by their ids, `<[1013]>`. What is made
of the output later looks for their spellings, so other tokens must not spell them either: the first line of a grammar
names those tokens (`head`), and whoever follows it sees to that (`actors/decode/grammar.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_BYTES = 64 * 1024
"""Of one grammar."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # of 0.4 KB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Of one grammar and its steps: beyond them it is in error, for good."""

_UNSPELT = "// unspelt:"
_OPTIONS = '%llguidance {"no_forcing": true}'
"""How text is cut into tokens is left to the model."""


def head(unspelt: Sequence[int]) -> str:
    """The first lines of a grammar: the control tokens whose spellings may not come about in other ways."""
    return f"{_UNSPELT} {' '.join(map(str, unspelt))}\n{_OPTIONS}\n"


def unspelt_of(grammar: str) -> list[int]:
    """What `head` was given."""
    first = grammar.partition("\n")[0]
    return [int(id) for id in first[len(_UNSPELT) :].split()] if first.startswith(_UNSPELT) else []


class Vocabulary:
    """Tokens as llguidance asks for them: `tokens` holds the bytes of each id, those of `special` are no text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end_token: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end_token
        self._bytes = {token: id for id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Some way of writing a text: asked for only where one is forced, which `head` turns off."""
        raw = text.encode() if isinstance(text, str) else text
        return [self._bytes[bytes([byte])] for byte in raw if bytes([byte]) in self._bytes]

    def tokenizer(self) -> LLTokenizer:
        """Takes about half a second for 129,280 tokens."""
        return LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_id)  # type: ignore[arg-type]


def follow(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """From the start of an output on. It never raises: `reason` says what is wrong with it."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def reason(matcher: LLMatcher) -> str:
    """Why it cannot go on, in one line; empty if it can."""
    if not matcher.is_error():
        return ""
    lines = matcher.get_error().splitlines() or ["it cannot go on"]
    detail = next((line for line in lines if line.startswith("error: ")), "")  # of a pattern, below an excerpt of it
    return f"{lines[0]} {detail}".strip()
