"""One request as its entrypoint shard sees it: who owns it, what it emitted, and its one end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from schemas.bulk import Handle
from schemas.handover import Claimed, ClaimRefused
from schemas.message import Role
from schemas.request import End, Submit
from schemas.vision import EncodeImage, ImageEmbeddings, ImageEncoded


class Verdict(Enum):
    """What became of a batch of tokens: NEWS was taken, STALE was seen before or is not the owner's, GAP is missing
    something before it."""

    NEWS = "news"
    STALE = "stale"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class Owner:
    """Where the state of a request is."""

    role: Role
    replica: str


@dataclass(slots=True)
class Request:
    """The state machine: waiting → dispatched to prefill → claimed by decode → ended.

    The shard alone issues epochs, from one growing series for all its requests: each change of owner gets the next
    one, and tokens count only under the current one. So nothing said of an earlier request of the same id counts.
    Times are seconds of the caller's clock.
    """

    submit: Submit
    epochs: Iterator[int]
    heard_s: float
    prompt: bytes = b""
    encoded: list[ImageEncoded] = field(default_factory=list)
    lost: list[ImageEncoded] = field(default_factory=list)
    epoch: int = 0
    claimed_from: int = 0
    is_dispatching: bool = False
    owner: Owner | None = None
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    ended_s: float = 0.0

    @property
    def id(self) -> str:
        return self.submit.request_id

    def to_encode(self) -> list[EncodeImage]:
        """What vision has still to do for it: its images, unless they are encoded."""
        if self.encoded:
            return []
        deadline_ns = self.submit.limits.deadline_ns
        return [EncodeImage(request_id=self.id, image=image, deadline_ns=deadline_ns) for image in self.submit.images]

    def were_encoded(self, encoded: list[ImageEncoded]) -> None:
        """Its images are there for prefill."""
        self.encoded = encoded

    def were_lost(self) -> bool:
        """Prefill could not get them. True if they can be encoded again: once."""
        is_first = not self.lost
        self.lost, self.encoded = self.lost + self.encoded, []
        return is_first

    def embeddings(self) -> list[ImageEmbeddings]:
        """For prefill: its encoded images and where they stand."""
        return [
            ImageEmbeddings(start=image.start, num_tokens=image.num_tokens, embeddings=encoded.embeddings)
            for image, encoded in zip(self.submit.images, self.encoded, strict=True)
        ]

    def held(self) -> list[tuple[str, Handle]]:
        """All that vision replicas hold for it, as (replica, handle)."""
        pixels = [(image.vision, image.pixels) for image in self.submit.images]
        return pixels + [(encoded.vision, encoded.embeddings) for encoded in self.lost + self.encoded]

    def dispatch(self, replica: str, now_s: float) -> int:
        """A prefill replica is about to be given the request. The epoch it holds it under.

        Until `dispatched` or `refused` it need not know of it.
        """
        self.is_dispatching = True
        self.epoch = next(self.epochs)
        self.owner = Owner(Role.PREFILL, replica)
        self.heard_s = now_s
        return self.epoch

    def dispatched(self, now_s: float) -> None:
        """The replica has it."""
        self.is_dispatching = False
        self.heard_s = now_s

    def refused(self) -> None:
        """The replica did not take it (or did not say): whatever it does under that epoch no longer counts."""
        self.is_dispatching = False
        self.epoch = next(self.epochs)
        self.owner = None

    def claim(self, from_epoch: int, replica: str, now_s: float) -> Claimed | ClaimRefused:
        """A decode replica has the state. The first claim from the current epoch wins; a repeated one is confirmed."""
        if self.end is not None:
            return ClaimRefused(reason="the request has ended")
        if from_epoch == self.claimed_from and self.owner == Owner(Role.DECODE, replica):
            return Claimed(epoch=self.epoch)
        if from_epoch != self.epoch:
            return ClaimRefused(reason=f"epoch {from_epoch} is over, {self.epoch} is current")
        self.claimed_from = from_epoch
        self.is_dispatching = False
        self.epoch = next(self.epochs)
        self.owner = Owner(Role.DECODE, replica)
        self.heard_s = now_s
        return Claimed(epoch=self.epoch)

    def accept(self, epoch: int, first_index: int, tokens: Sequence[int], end: End | None, now_s: float) -> Verdict:
        """Tokens (and perhaps the end) from whoever says to own the request.

        Taken are only those of the current epoch, each index once. After a GAP nothing was taken: ask for a resend.
        """
        if self.end is not None or epoch != self.epoch:
            return Verdict.STALE
        self.heard_s = now_s
        if first_index > len(self.tokens):
            return Verdict.GAP
        fresh = tokens[len(self.tokens) - first_index :]
        if not fresh and end is None:
            return Verdict.STALE
        self.tokens.extend(fresh)
        if end is not None:
            self.finish(end, now_s)
        return Verdict.NEWS

    def finish(self, end: End, now_s: float) -> bool:
        """End the request. False, and nothing changes, if it has ended before."""
        if self.end is not None:
            return False
        self.end = end
        self.ended_s = now_s
        self.prompt = b""
        return True
