"""One request as entrypoint shards get it: all that another one needs to go on with it, should its own be lost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import structs

from schemas.bulk import Payload
from schemas.quota import AdmitCall
from schemas.request import Submit

MAX_LOSSES = 3
"""A request that so many shards in a row were lost with, without a token, ends: it may be what they died of."""

MAX_MOVES = 10
"""It goes to so many other shards at most: whoever cancels it by its first id asks for all it may have since."""

PATIENCE_S = 20.0
"""A process is started anew within this time."""


def ids(request_id: str) -> list[str]:
    """All that a shard may know a request by."""
    return [_id(request_id, number) for number in range(MAX_MOVES + 1)]


def _id(request_id: str, number: int) -> str:
    return f"{request_id}-{number}" if number else request_id


class Submission:
    """Its prompt, and the output so far. Each shard gets it under an id of its own, so that nothing which the one
    before, or whoever worked for that, still says or does is taken for the new one's.
    """

    def __init__(self, submit: Submit, prompt: bytes) -> None:
        self.id = submit.request_id
        self._submit, self._prompt = submit, prompt
        self._output = array("I")
        self._num_moves = self._num_losses = 0

    def emitted(self, tokens: Sequence[int]) -> None:
        """These came, behind all that came before."""
        self._output.extend(tokens)
        self._num_losses = 0

    def move(self) -> bool:
        """It is for another shard now, as another one. False if it was moved too often."""
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES or self._num_moves == MAX_MOVES:
            return False
        self._num_moves += 1
        self.id = _id(self._submit.request_id, self._num_moves)
        return True

    @property
    def is_new(self) -> bool:
        """No shard has had it: it may be refused where there is no room."""
        return not self._num_moves

    def patience_s(self, now_ns: int) -> float:
        """How long to wait for a shard that takes it."""
        deadline_ns = self._submit.limits.deadline_ns
        return min(PATIENCE_S, max(deadline_ns - now_ns, 0) / 1e9) if deadline_ns else PATIENCE_S

    def admit(self) -> AdmitCall:
        """What asks whether its tenant may have it."""
        one = self._submit
        return AdmitCall(tenant=one.tenant, request_id=one.request_id, num_prompt_tokens=one.num_prompt_tokens)

    @property
    def text(self) -> bytes:
        """The prompt, and behind it the output, token ids as little-endian u32."""
        return self._prompt + self._output.tobytes()

    def message(self, text: Payload) -> Submit:
        """What gives it to a shard. `text` as it is now."""
        return structs.replace(self._submit, request_id=self.id, prompt=text, num_output=len(self._output))
