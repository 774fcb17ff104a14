"""How far a stream is, and when it counts as silent or lost."""

from __future__ import annotations

from dataclasses import dataclass

from actors.gateway.exchange import KEEP_ALIVE_S, Exchange, by_recipe
from actors.gateway.http import Request
from schemas.api import Protocol


@dataclass
class Stream:
    """A stream as far as an exchange sees it."""

    stream_id: int = 1
    next_seq: int = 0


def make(recipe: str = "rc0") -> Exchange[Stream]:
    request = Request("POST", "/v1/chat/completions", {}, "id")
    return Exchange(request, Protocol.CHAT_COMPLETIONS, Stream(), 0.0, recipe)


def test_silence_is_since_the_last_look() -> None:
    exchange = make()
    assert exchange.is_silent(5.0) and not exchange.needs_keep_alive(5.0)
    exchange.stream.next_seq = 3
    assert not exchange.is_silent(9.0)
    assert exchange.is_silent(12.0) and not exchange.needs_keep_alive(12.0)
    assert exchange.needs_keep_alive(9.0 + KEEP_ALIVE_S) and not exchange.needs_keep_alive(9.5 + KEEP_ALIVE_S)
    assert not make(recipe="").is_silent(5.0), "nobody can be asked yet"


def test_two_strikes_in_a_row_are_a_loss() -> None:
    exchange = make()
    assert not exchange.is_lost(-1)
    assert exchange.is_lost(-1)
    exchange = make()
    assert not exchange.is_lost(-1) and not exchange.is_lost(0)
    assert not exchange.is_lost(-1), "the answer between the two was good"


def test_progress_takes_strikes_back() -> None:
    exchange = make()
    for seq in (2, 4, 6):
        assert not exchange.is_lost(-1)
        exchange.stream.next_seq = seq
        assert not exchange.is_silent(float(seq))


def test_exchanges_go_by_recipe() -> None:
    first, second, third = make("a"), make("b"), make("a")
    assert by_recipe([first, second, third]) == {"a": [first, third], "b": [second]}
