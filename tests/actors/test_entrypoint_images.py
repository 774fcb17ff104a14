"""Which images prefill is given, and what vision replicas hold of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.entrypoint.images import Images
from schemas.bulk import Handle
from schemas.vision import EncodeImage, Image, ImageEncoded


def handle(key: str) -> Handle:
    return Handle(address="mem://x", key=key, generation=1, size_bytes=1, checksum=0)


def spans(*ends: int) -> list[Image]:
    """Of ten tokens each."""
    fields = {"num_tokens": 10, "digest": "d", "width": 1, "height": 1, "vision": "v"}
    return [Image(start=end - 10, pixels=handle(f"pixels {end}"), **fields) for end in ends]  # type: ignore[arg-type]


def encode(images: Images, start: int, made: Counter[str]) -> list[int]:
    """Have done what is wanted; the ends of those."""
    wanted = images.wanted(start)
    asked = [EncodeImage(request_id="r", image=image) for image in wanted]
    ends = [image.start + 10 for image in wanted]
    keys = [f"rows {end} {made.total()}" for end in ends]
    made.update(keys)
    images.were_encoded(asked, [ImageEncoded(vision="v", embeddings=handle(key)) for key in keys])
    return ends


def test_only_what_ends_behind_the_start_is_encoded_and_what_is_there_is_kept() -> None:
    images, made = Images(spans(100, 256, 266, 400)), Counter[str]()
    assert encode(images, 256, made) == [266, 400]
    images_from, given = images.given(256)
    assert (images_from, [one.start + one.num_tokens for one in given]) == (256, [266, 400])
    assert encode(images, 255, made) == [256] and encode(images, 384, made) == []
    images_from, given = images.given(384)
    assert (images_from, [one.start + one.num_tokens for one in given]) == (100, [256, 266, 400])
    assert encode(images, 0, made) == [100]
    assert images.given(384)[0] == 0 and len(images.given(384)[1]) == 4


@given(
    st.sets(st.integers(1, 12), max_size=5),
    st.lists(st.tuples(st.integers(0, 130), st.sampled_from(["given", "lost", "taken"])), max_size=8),
)
def test_whatever_happens_none_is_missing_and_all_is_let_go_once(
    places: set[int], story: list[tuple[int, str]]
) -> None:
    ends = sorted(10 * place for place in places)
    images, made, gone = Images(spans(*ends)), Counter[str](), Counter[str]()
    for start, event in story:
        encode(images, start, made)
        images_from, handed = images.given(start)
        assert images_from <= start
        assert [one.start + 10 for one in handed] == [end for end in ends if end > images_from]
        assert not images_from or images_from in ends
        if event == "lost":
            images.were_lost()
        elif event == "taken":
            held = images.let_go(is_computed=False)
            gone.update(handle.key for _, handle in held)
            assert not any("pixels" in handle.key for _, handle in held)
            assert len(images.wanted(0)) == len(ends), "prefill may be lost, and all can be encoded again"
    gone.update(handle.key for _, handle in images.let_go(is_computed=True))
    assert gone == Counter([*made, *(f"pixels {end}" for end in ends)])
    assert images.let_go(is_computed=True) == []


def test_what_was_lost_is_encoded_once_more() -> None:
    images, made = Images(spans(100)), Counter[str]()
    encode(images, 0, made)
    assert images.were_lost() and encode(images, 0, made) == [100]
    assert not images.were_lost()
