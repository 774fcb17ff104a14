"""Tokens on their way to one destination: gathered while its window is shut, sent in few messages when it opens."""

from __future__ import annotations

from collections.abc import Sequence

from actors.rules.emission import Emission
from actors.rules.window import Window
from schemas.request import LastWord, TokenLogprobs, TokensEmitted


class Outbox:
    """Emissions of one sender by destination, each behind its window. Times are seconds of the caller's clock."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._emissions: dict[str, Emission] = {}
        self._windows: dict[str, Window] = {}

    def add(
        self,
        destination: str,
        request_id: str,
        epoch: int,
        first_index: int,
        tokens: Sequence[int],
        end: LastWord | None = None,
        num_cached: int = 0,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Tokens of a request for a destination, and the rest as in `Emission.add`."""
        if destination not in self._emissions:
            self._emissions[destination] = Emission(self._source)
            self._windows.setdefault(destination, Window())
        self._emissions[destination].add(request_id, epoch, first_index, tokens, end, num_cached, logprobs)

    def may_send(self, destination: str, now_s: float) -> bool:
        """Whether what is added for it could go out at once."""
        window = self._windows.get(destination)
        return window is None or window.may_send(now_s)

    def take(self, now_s: float) -> list[tuple[str, TokensEmitted]]:
        """(destination, message) to send now; what is behind a shut window stays."""
        ready = [d for d in self._emissions if self._windows[d].may_send(now_s)]
        messages = []
        for destination in ready:
            for message in self._emissions.pop(destination).take():
                self._windows[destination].sent(now_s)
                messages.append((destination, message))
        return messages

    def taken(self, destination: str, now_s: float) -> None:
        """A receipt came in: more may be sent there."""
        if destination in self._windows:
            self._windows[destination].taken(now_s)

    def drop(self, destination: str) -> None:
        """The destination is gone, and what waits for it is of no use. Idempotent."""
        self._emissions.pop(destination, None)
        self._windows.pop(destination, None)

    def is_idle(self, now_s: float) -> bool:
        """Nothing waits, and what was sent was taken."""
        return not self._emissions and all(window.may_send(now_s) for window in self._windows.values())
