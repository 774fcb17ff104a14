"""What the tokens of a request may be next, where its output has a grammar (`actors/rules/grammars.py`)."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from actors.rules.grammars import Vocabulary, follow, reason, unspelt_of
from actors.rules.vocabulary import tokens
from kernels.constraint import Bits

MAX_TAIL = 32
"""The spelling of a control token has at most so many bytes."""

KEPT = 24
"""Grammars that are kept, compiled: requests of one client often have the same. Each has up to 20 MB at worst."""

MOST_RENEWALS = 2


class Unspelt:
    """Keeps text from spelling a control token: what is made of the output would take it for one.

    `forbidden[n]`: the bits of the tokens that would complete it behind its first n bytes.
    """

    def __init__(self, spelling: bytes, vocabulary: Vocabulary) -> None:
        self._spelling = spelling
        special = set(vocabulary.special_token_ids)
        texts = [(id, token) for id, token in enumerate(vocabulary.tokens) if id not in special]
        found: dict[int, list[int]] = {0: [id for id, token in texts if spelling in token]}
        for num in range(1, len(spelling)):
            rest = spelling[num:]
            found[num] = [id for id, token in texts if token.startswith(rest)]
        self._forbidden = {num: _bits(ids, len(vocabulary.tokens)) for num, ids in found.items() if ids}

    def forbid(self, allowed: Bits, tail: bytes) -> None:
        """In place, behind text that ends like this: int32 [words]."""
        for num, bits in self._forbidden.items():
            if tail.endswith(self._spelling[:num]):
                allowed &= ~bits


class Space:
    """The tokens of a model, as text and as bits."""

    def __init__(self, path: Path, num_tokens: int, end_token: int) -> None:
        """Takes about two seconds for 129,280 tokens."""
        texts, special = tokens(path, num_tokens)
        self.vocabulary = Vocabulary(texts, special, end_token)
        self.tokenizer = self.vocabulary.tokenizer()
        self.special = frozenset(special)
        self.end_token = end_token
        self.num_words = -(-num_tokens // 32)
        self.end = _bits([end_token], num_tokens)


class Grammars:
    """Those that the requests of a replica were lately to follow, compiled. From threads, too: what two of them begin
    at once is done twice.
    """

    def __init__(self, path: Path | None, num_tokens: int, end_token: int) -> None:
        """`path` is that of the tokenizer; it is read when the first grammar comes."""
        self._path, self._num_tokens, self._end_token = path, num_tokens, end_token
        self._unspelt: dict[int, Unspelt] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @functools.cached_property
    def _space(self) -> Space:
        if self._path is None:
            raise RuntimeError("a grammar is of no use without a tokenizer")
        return Space(self._path, self._num_tokens, self._end_token)

    def follow(self, text: str, output: Sequence[int] = ()) -> Grammar:
        """A grammar behind an output. It takes milliseconds when it is new: to be done beside the loop.

        One that cannot be followed says so in `Grammar.error`.
        """
        space = self._space
        compiled = self._compiled.pop(text, None) or self._anew(text)
        self._compiled[text] = compiled
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        for id in unspelt_of(text):
            if id not in self._unspelt:
                self._unspelt[id] = Unspelt(space.vocabulary.tokens[id], space.vocabulary)
        unspelt = [self._unspelt[id] for id in unspelt_of(text)]
        grammar = Grammar(space, compiled.deep_copy(), unspelt, functools.partial(self._anew, text))
        grammar.accept(output)
        return grammar

    def _anew(self, text: str) -> LLMatcher:
        """Shared with nobody: what is compiled shares its lexer with its copies, and its limits."""
        self._compiled.pop(text, None)
        return follow(self._space.tokenizer, text)


class Grammar:
    """A `kernels.constraint.Constraint`: where a request is in its grammar. It is a function of the grammar and of the
    output so far, so a request that comes from elsewhere goes on with `accept(output)`.

    `error` says why it cannot go on, once it cannot.
    """

    def __init__(
        self, space: Space, matcher: LLMatcher, unspelt: Sequence[Unspelt], anew: Callable[[], LLMatcher]
    ) -> None:
        self.error = reason(matcher)
        self._space = space
        self._matcher = matcher
        self._unspelt = unspelt
        self._anew = anew
        self._num_renewals = 0
        self._takes_drafts = True
        self._taken: list[int] = []
        self._tail = b""  # of the text behind the last control token
        self._has_ended = False

    def allow(self, drafts: Sequence[int]) -> Bits:
        if self.error or ((first := self._first()) is None):
            return np.empty((0, self._space.num_words), dtype=np.int32)
        rows: list[Bits] = [first]
        tail, has_ended, num_taken = self._tail, self._has_ended, 0
        for draft in drafts if self._takes_drafts else ():
            if not _has(rows[-1], draft):
                break
            if draft == self._space.end_token:
                has_ended = True
            else:  # behind the end nothing else is allowed
                self._matcher.consume_token(draft)
                num_taken += 1
                tail = self._behind(tail, draft)
            row, error = (self._space.end, "") if has_ended else self._row(tail)
            if error:
                break  # whether it gets there, and fails then, is for the model to say
            rows.append(row)
        if self._matcher.is_error():
            self._takes_drafts = False  # without them it would not have come to that, nor is to end by it
            self._begin_again()
        elif num_taken:
            self._matcher.rollback(num_taken)
        return np.stack(rows)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._has_ended or self.error:
                return
            if token == self._space.end_token:
                self._has_ended = True
            elif self._matcher.consume_token(token) or (self._renew() and self._matcher.consume_token(token)):
                self._taken.append(token)
                self._tail = self._behind(self._tail, token)
            else:
                self.error = reason(self._matcher) or f"token {token} is not allowed here"

    def _first(self) -> Bits | None:
        """What may come now; None when it cannot be said, and why in `error`."""
        if self._has_ended:
            return self._space.end
        row, error = self._row(self._tail)
        if self._matcher.is_error() and self._renew():
            row, error = self._row(self._tail)
        self.error = error
        return None if error else row

    def _row(self, tail: bytes) -> tuple[Bits, str]:
        """What may come behind what the matcher has taken; or why that cannot be said."""
        row: Bits = np.zeros(self._space.num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for unspelt in self._unspelt:
            unspelt.forbid(row, tail)
        return row, reason(self._matcher) or ("" if row.any() else "nothing is allowed here")

    def _renew(self) -> bool:
        """`_begin_again`, for it stays in an error for good. False if that was done often enough."""
        if self._num_renewals == MOST_RENEWALS:
            return False
        self._num_renewals += 1
        return self._begin_again()

    def _begin_again(self) -> bool:
        """Without the others of this grammar, and without what led into an error."""
        self._matcher = self._anew()
        return bool(self._matcher.consume_tokens(self._taken))

    def _behind(self, tail: bytes, token: int) -> bytes:
        if token in self._space.special:
            return b""
        return (tail + self._space.vocabulary.tokens[token])[-MAX_TAIL:]


def _bits(ids: Sequence[int], num_tokens: int) -> Bits:
    words = np.zeros(-(-num_tokens // 32), dtype=np.uint32)
    np.bitwise_or.at(words, np.asarray(ids, dtype=np.int64) // 32, _bit(np.asarray(ids, dtype=np.uint32)))
    return words.view(np.int32)


def _bit(ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    bit: npt.NDArray[np.uint32] = np.left_shift(np.uint32(1), ids % np.uint32(32), dtype=np.uint32)
    return bit


def _has(row: Bits, token: int) -> bool:
    return bool(row[token // 32] >> (token % 32) & 1)
