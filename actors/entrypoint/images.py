"""The images of one request: which of them prefill has to be given, and what vision replicas hold until it has them."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.bulk import Handle
from schemas.vision import EncodeImage, Image, ImageEmbeddings, ImageEncoded


class Images:
    """Prefill computes from some token `start` on: images that end at or before it are read by nobody, and need not be
    encoded. Where it turns out that they are read after all, their pixels are still there.

    `is_encoding`: vision is at some of them.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        self.is_encoding = False
        self._images = images
        self._encoded: dict[int, ImageEncoded] = {}  # by the start of its span
        self._lost: list[ImageEncoded] = []
        self._pixels = [(image.vision, image.pixels) for image in images]

    def wanted(self, start: int) -> list[Image]:
        """Those that have still to be encoded to compute from `start` on."""
        return [image for image in self._images if _end(image) > start and image.start not in self._encoded]

    def were_encoded(self, asked: Sequence[EncodeImage], made: Sequence[ImageEncoded]) -> None:
        """These are there for prefill."""
        self._encoded |= {one.image.start: encoded for one, encoded in zip(asked, made, strict=True)}

    def given(self, start: int) -> tuple[int, list[ImageEmbeddings]]:
        """For prefill, to compute from `start` on: `CachedPrefix.images_from`, and all that reach past it.

        None of them may be `wanted`.
        """
        left_out = [_end(image) for image in self._images if image.start not in self._encoded]
        assert all(end <= start for end in left_out)
        images_from = max(left_out, default=0)  # as far in front as can be: less that is restored may still do
        return images_from, [
            ImageEmbeddings(
                start=image.start, num_tokens=image.num_tokens, embeddings=self._encoded[image.start].embeddings
            )
            for image in self._images
            if _end(image) > images_from
        ]

    def were_lost(self) -> bool:
        """Prefill could not get them. True if they can be encoded again: once."""
        is_first = not self._lost
        self._lost += self._encoded.values()
        self._encoded = {}
        return is_first

    def let_go(self, *, is_computed: bool) -> list[tuple[str, Handle]]:
        """What vision replicas need not hold any more, as (replica, handle), now that prefill has what it was given.

        Pixels, too, when the prompt `is_computed`, or will not be: until then it may be returned, or prefill be lost.
        """
        held = [(encoded.vision, encoded.embeddings) for encoded in (*self._lost, *self._encoded.values())]
        self._lost, self._encoded = [], {}
        if is_computed:
            held += self._pixels
            self._pixels = []
        return held


def _end(image: Image) -> int:
    return image.start + image.num_tokens
