"""What a prefill replica is given of images, before it takes a request on."""

from __future__ import annotations

import numpy as np
import pytest

from actors.prefill.job import Job
from schemas.bulk import Handle
from schemas.handover import Dispatch
from schemas.vision import ImageEmbeddings
from tests.actors.builders import dispatch
from tests.actors.eyes import HIDDEN_SIZE
from tests.actors.sight import TOKEN


def with_images(*images: ImageEmbeddings, prompt: list[int]) -> tuple[Dispatch, bytes]:
    plain = dispatch(num_tokens=len(prompt))
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__} | {"images": list(images)}
    return Dispatch(**fields), np.asarray(prompt, dtype="<u4").tobytes()


def rows(num_tokens: int) -> bytes:
    return b"\x01" * (4 * HIDDEN_SIZE * num_tokens)


def at(start: int, num_tokens: int) -> ImageEmbeddings:
    handle = Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0)
    return ImageEmbeddings(start=start, num_tokens=num_tokens, embeddings=handle)


def test_a_job_has_the_rows_of_its_images() -> None:
    message, prompt = with_images(at(1, 2), at(4, 1), prompt=[7, TOKEN, TOKEN, 8, TOKEN])
    job = Job.of(message, prompt, [rows(2), rows(1)])
    assert [(image.start, len(image.embeddings)) for image in job.images] == [(1, len(rows(2))), (4, len(rows(1)))]
    assert job.num_left == 5


@pytest.mark.parametrize(
    ("images", "given"),
    [
        ([at(1, 3)], [rows(3)]),  # not all of them the same token
        ([at(4, 2)], [rows(2)]),  # past the end
        ([at(1, 0)], [rows(1)]),
        ([at(1, 2)], [b""]),
        ([at(1, 2)], [rows(2)[:-1]]),
    ],
)
def test_what_was_not_announced_is_no_job(images: list[ImageEmbeddings], given: list[bytes]) -> None:
    message, prompt = with_images(*images, prompt=[7, TOKEN, TOKEN, 8, TOKEN])
    with pytest.raises(ValueError, match="image"):
        Job.of(message, prompt, given)
    with pytest.raises(ValueError, match="prompt tokens"):
        Job.of(message, prompt[:-4], given)
