"""Images in bodies of the three protocols: found, decoded, put in their places; or refused by name."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from anthropic.types.model_capabilities import ModelCapabilities
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.recipe.card import CardError, ModelCard
from actors.recipe.converter import Converter, Draft, Prepared
from actors.recipe.fetch import MAX_URL_BYTES
from actors.recipe.fields import Refusal
from actors.recipe.images import MAX_IMAGES, Source, files_of
from schemas.api import Protocol
from schemas.failure import Code, Failure
from tests.actors.bodies import CHAT, GENERATING, MESSAGES, RESPONSES
from tests.actors.edge import CONTEXT_TOKENS, IMAGE_TOKEN, make_card
from tests.actors.pictures import at, block, body_of, data_url, in_base64, picture, resolved, text

RED, BLUE = picture("red"), picture("blue")
CONTENT = {
    CHAT: "messages[0].content[0].image_url",
    RESPONSES: "input[0].content[0].image_url",
    MESSAGES: "messages[0].content[0].source",
}


@pytest.fixture(scope="module")
def eyes(sighted: ModelCard) -> Converter:
    return Converter(sighted)


def read(eyes: Converter, protocol: Protocol, body: dict[str, Any]) -> Draft:
    return eyes.read(protocol, json.dumps(body).encode())


def refused(eyes: Converter, protocol: Protocol, body: dict[str, Any]) -> Failure:
    with pytest.raises(Refusal) as refusal:
        read(eyes, protocol, body)
    return refusal.value.failure


def tokens_of(prepared: Prepared) -> list[int]:
    return [int(id) for id in np.frombuffer(prepared.prompt, dtype="<u4")]


@pytest.mark.parametrize("protocol", GENERATING)
def test_images_stand_where_the_body_has_them(eyes: Converter, protocol: Protocol) -> None:
    draft = read(eyes, protocol, body_of(protocol, "one", RED, "two", BLUE))
    assert [source.data for source in draft.images] == [RED, BLUE]
    assert list(draft.tokens).count(IMAGE_TOKEN) == 2
    prepared = eyes.finish(draft, [resolved(5, "a"), resolved(7, "b")], 7)
    ids = tokens_of(prepared)
    assert ids.count(IMAGE_TOKEN) == 12
    assert len(ids) == prepared.num_prompt_tokens == len(draft.tokens) + 10
    assert [(image.digest, image.num_tokens) for image in prepared.images] == [("a", 5), ("b", 7)]
    for image in prepared.images:
        span = ids[image.start : image.start + image.num_tokens]
        assert span == [IMAGE_TOKEN] * image.num_tokens
        assert ids[image.start - 1] != IMAGE_TOKEN != ids[image.start + image.num_tokens]
    swapped = read(eyes, protocol, body_of(protocol, RED, "one", BLUE, "two"))
    assert list(swapped.tokens) != list(draft.tokens)


@pytest.mark.parametrize("protocol", GENERATING)
def test_text_that_spells_the_image_token_stays_text(eyes: Converter, protocol: Protocol) -> None:
    draft = read(eyes, protocol, body_of(protocol, "<｜image｜>", RED, "x<｜image｜>x"))
    assert list(draft.tokens).count(IMAGE_TOKEN) == 1
    prepared = eyes.finish(draft, [resolved(4)], 7)
    assert tokens_of(prepared).count(IMAGE_TOKEN) == 4
    plain = read(eyes, protocol, body_of(protocol, "<｜image｜>"))
    assert IMAGE_TOKEN not in plain.tokens and plain.images == []


def test_images_of_tool_results_follow_the_order_of_the_calls(eyes: Converter) -> None:
    """The library puts the results into that order, whatever order they came in."""
    calls = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ("a", "b")]
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": [block(MESSAGES, BLUE)]},
        {"type": "tool_result", "tool_use_id": "a", "content": [text(MESSAGES, "x"), block(MESSAGES, RED)]},
        block(MESSAGES, picture("green")),
    ]
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": calls}]
    body = {"model": "tiny", "messages": [*turns, {"role": "user", "content": results}]}
    draft = read(eyes, MESSAGES, body)
    assert [source.data for source in draft.images] == [RED, BLUE, picture("green")]
    assert draft.images[0].path == "messages[2].content[1].content[1].source"
    made = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ("a", "b")]
    told = [{"role": "tool", "tool_call_id": i, "content": [block(CHAT, c)]} for i, c in (("b", BLUE), ("a", RED))]
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": made}, *told]
    draft = read(eyes, CHAT, {"model": "tiny", "messages": turns})
    assert [(source.path, source.data) for source in draft.images] == [
        ("messages[3].content[0].image_url", RED),
        ("messages[2].content[0].image_url", BLUE),
    ]
    outputs = [
        {"type": "function_call_output", "call_id": "b", "output": [block(RESPONSES, BLUE)]},
        {"type": "function_call_output", "call_id": "a", "output": [block(RESPONSES, RED)]},
    ]
    calls = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in ("b", "a")]
    body = {"model": "tiny", "input": [{"role": "user", "content": "go"}, *calls, *outputs]}
    draft = read(eyes, RESPONSES, body)
    assert [(source.path, source.data) for source in draft.images] == [
        ("input[4].output[0].image_url", RED),
        ("input[3].output[0].image_url", BLUE),
    ]


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES])
def test_a_system_message_may_hold_an_image_and_an_assistants_may_not(eyes: Converter, protocol: Protocol) -> None:
    name = "input" if protocol is RESPONSES else "messages"
    turns = [{"role": "system", "content": [block(protocol, RED)]}, {"role": "user", "content": "x"}]
    assert len(read(eyes, protocol, {"model": "tiny", name: turns}).images) == 1
    turns[0]["role"] = "assistant"
    failure = refused(eyes, protocol, {"model": "tiny", name: turns})
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, f"{name}[0].content[0]")


@pytest.mark.parametrize("mime", ["image/png", "image/PNG", "image/png;charset=utf-8"])
def test_spellings_of_data_urls(eyes: Converter, mime: str) -> None:
    url = data_url(RED, mime).replace("iVBOR", "iV BO\nR").rstrip("=")
    draft = read(eyes, CHAT, body_of(CHAT, {"type": "image_url", "image_url": {"url": url}}))
    assert draft.images[0].data == RED


@pytest.mark.parametrize(
    ("format", "mime"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("JPEG", "image/jpg"), ("GIF", "image/gif"), ("WEBP", "image/webp")],
)
@pytest.mark.parametrize("protocol", GENERATING)
def test_every_format(eyes: Converter, protocol: Protocol, format: str, mime: str) -> None:
    data = picture(format=format)
    draft = read(eyes, protocol, body_of(protocol, block(protocol, data, mime)))
    assert [(source.path, source.data) for source in draft.images] == [(CONTENT[protocol], data)]
    other = "image/gif" if mime != "image/gif" else "image/png"
    failure = refused(eyes, protocol, body_of(protocol, block(protocol, data, other)))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[protocol])
    assert "but the data is a" in failure.message


def test_detail_is_ignored_and_listed(eyes: Converter) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(RED), "detail": "low"}}
    assert read(eyes, CHAT, body_of(CHAT, image)).normal.ignored == ["content[].image_url.detail"]
    image["image_url"]["detail"] = "tiny"  # type: ignore[index]
    assert refused(eyes, CHAT, body_of(CHAT, image)).code is Code.BAD_REQUEST
    draft = read(eyes, RESPONSES, body_of(RESPONSES, {**block(RESPONSES, RED), "detail": "high"}))
    assert draft.normal.ignored == ["content[].detail"]


BAD_URLS = ["", "data:,", "ftp://x/y.png", "data:image/png,abc", "data:image/tiff;base64,A", "data:image/png;base64,@"]


@pytest.mark.parametrize("url", [*BAD_URLS, "data:image/png;base64,A", "data:text/html;base64,AAAA", 7, None, {}])
def test_what_is_no_data_url(eyes: Converter, url: Any) -> None:
    failure = refused(eyes, CHAT, body_of(CHAT, {"type": "image_url", "image_url": {"url": url}}))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[CHAT])
    failure = refused(eyes, RESPONSES, body_of(RESPONSES, {"type": "input_image", "image_url": url}))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[RESPONSES])


@pytest.mark.parametrize("url", ["data:" + ";" * 10**6, "data:" + ";base64" * 10**5])
def test_a_url_with_a_long_head_costs_no_more_than_to_parse_it(eyes: Converter, url: str) -> None:
    body = json.dumps(body_of(CHAT, {"type": "image_url", "image_url": {"url": url}})).encode()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="data URL"):
            eyes.read(CHAT, body)
        assert tracemalloc.get_traced_memory()[1] < 15 * len(url)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "image/tiff", "data": "AAAA"},
        {"type": "base64", "data": in_base64(RED)},
        {"type": "base64", "media_type": "image/png", "data": "@@@@"},
        {"type": "base64", "media_type": "image/png"},
        {"type": "zorg"},
        "x",
        None,
    ],
    ids=str,
)
def test_what_is_no_source(eyes: Converter, source: Any) -> None:
    failure = refused(eyes, MESSAGES, body_of(MESSAGES, {"type": "image", "source": source}))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[MESSAGES])


@pytest.mark.parametrize(
    ("protocol", "image", "field"),
    [
        (RESPONSES, {"type": "input_image", "file_id": "f"}, "input[0].content[0].file_id"),
        (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, CONTENT[MESSAGES]),
    ],
)
def test_files_that_would_have_to_be_kept_are_refused_by_name(
    eyes: Converter, protocol: Protocol, image: dict[str, Any], field: str
) -> None:
    failure = refused(eyes, protocol, body_of(protocol, "x", image))
    assert (failure.code, failure.field) == (Code.UNSUPPORTED, field.replace("content[0]", "content[1]"))
    assert "send the image" in failure.message


@pytest.mark.parametrize("protocol", GENERATING)
def test_a_url_is_left_to_be_fetched_and_has_an_end(eyes: Converter, protocol: Protocol) -> None:
    longest = "HTTPS://x.org/" + "a" * (MAX_URL_BYTES - 14)
    draft = read(eyes, protocol, body_of(protocol, "x", at(protocol, longest), RED))
    assert [(source.url, source.data) for source in draft.images] == [(longest, b""), ("", RED)]
    failure = refused(eyes, protocol, body_of(protocol, at(protocol, longest[:-1] + "é")))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[protocol])
    assert f"{MAX_URL_BYTES + 1} bytes" in failure.message
    for url in ("file:///etc/passwd", "ftp://x.org/y.png", " http://x.org/y.png", "//x.org/y.png", None, 7):
        failure = refused(eyes, protocol, body_of(protocol, at(protocol, url)))
        assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[protocol])


BROKEN = ["http://", "https:///", "http://exa mple.com/x.png", "http://exa%20mple.com/", "http://x.org:99999/x.png"]
BROKEN += ["http://x.org:port/", "http://x.org:-1/", "http://x.org:0/", "http://:80/", "http://u:p@/x", "http://[::1/"]
SOUND = ["http://x.org", "http://x.org:/a b.png?c=d e", "https://u:p@x.org:8443/", "http://[2001:db8::1]:80/", "http:///x"]
SOUND += ["http://x.org\\my cat.png", "http://b\u00fccher.example/", "http://2130706433/", "http://my_host.x.org./?u=http://"]


@pytest.mark.parametrize("protocol", GENERATING)
def test_a_url_that_leads_nowhere_is_a_bad_request(eyes: Converter, protocol: Protocol) -> None:
    for url in BROKEN:
        failure = refused(eyes, protocol, body_of(protocol, at(protocol, url)))
        assert (failure.code, failure.field) == (Code.BAD_REQUEST, CONTENT[protocol]), url
        assert "no server" in failure.message
    for url in SOUND:
        assert read(eyes, protocol, body_of(protocol, "x", at(protocol, url))).images[0].url == url


def test_the_image_that_failed_is_named_not_one_that_was_given_up_for_it() -> None:
    sources = [Source("a", url="http://a"), Source("b", url="http://b"), Source("c", data=RED)]
    given_up, failed = Failure(code=Code.CANCELLED, message="x"), Failure(code=Code.BAD_REQUEST, message="y")
    with pytest.raises(Refusal, match="b: y"):
        files_of(sources, {"http://a": given_up, "http://b": failed})
    with pytest.raises(Refusal, match="b: the URL gives no PNG, JPEG, GIF, WebP"):
        files_of(sources, {"http://a": BLUE, "http://b": b"<html>"})
    assert files_of(sources, {"http://a": BLUE, "http://b": RED}) == [BLUE, RED, RED]


@pytest.mark.parametrize(
    ("protocol", "part", "field"),
    [
        (CHAT, {**block(CHAT, RED), "text": "x"}, "text"),
        (CHAT, {**block(CHAT, RED), "zorg": 1}, "zorg"),
        (CHAT, {"type": "image_url", "image_url": {"url": data_url(RED), "file_id": "x"}}, "image_url.file_id"),
        (CHAT, {"type": "text", "text": "x", "image_url": {"url": data_url(RED)}}, "image_url"),
        (CHAT, {"type": "input_image", "image_url": data_url(RED)}, "type"),
        (RESPONSES, {"type": "image_url", "image_url": {"url": data_url(RED)}}, "type"),
        (MESSAGES, {"type": "text", "text": "x", "source": {}}, "source"),
        (MESSAGES, {**block(MESSAGES, RED), "id": "x"}, "id"),
    ],
)
def test_nothing_about_images_is_dropped_unseen(
    eyes: Converter, protocol: Protocol, part: dict[str, Any], field: str
) -> None:
    failure = refused(eyes, protocol, body_of(protocol, part))
    assert failure.code is Code.BAD_REQUEST
    assert failure.field.endswith(f"content[0].{field}")


def test_a_system_prompt_of_messages_holds_none(eyes: Converter) -> None:
    failure = refused(eyes, MESSAGES, body_of(MESSAGES, "x", system=[block(MESSAGES, RED)]))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, "system[0]")


@pytest.mark.parametrize("protocol", GENERATING)
def test_a_text_only_checkpoint_refuses_images_by_name(converter: Converter, protocol: Protocol) -> None:
    failure = refused(converter, protocol, body_of(protocol, "x", RED))
    assert failure.code is Code.UNSUPPORTED and "text-only" in failure.message
    assert failure.field.endswith("[0].content[1]")


def test_the_number_of_images_is_limited(eyes: Converter) -> None:
    assert len(read(eyes, CHAT, body_of(CHAT, *[RED] * MAX_IMAGES)).images) == MAX_IMAGES
    failure = refused(eyes, CHAT, body_of(CHAT, *[RED] * (MAX_IMAGES + 1)))
    assert (failure.code, failure.field) == (Code.BAD_REQUEST, f"messages[0].content[{MAX_IMAGES}]")


def test_images_that_do_not_fit_into_the_context_are_named(eyes: Converter) -> None:
    draft = read(eyes, CHAT, body_of(CHAT, RED, "x", BLUE))
    with pytest.raises(Refusal, match=f"{CONTEXT_TOKENS} tokens") as refusal:
        eyes.finish(draft, [resolved(1000), resolved(1050)], 7)
    failure = refusal.value.failure
    assert (failure.code, failure.field) == (Code.CONTEXT_LENGTH, "messages[0].content[2].image_url")
    assert "2050 of them for images" in failure.message
    eyes.finish(draft, [resolved(1000), resolved(1000)], 7)


def test_the_count_is_what_is_then_used(eyes: Converter) -> None:
    body = body_of(MESSAGES, "x", RED)
    images = [resolved(50)]
    counted = json.loads(eyes.count(read(eyes, Protocol.COUNT_TOKENS, body), images))
    assert counted == {"input_tokens": eyes.finish(read(eyes, MESSAGES, body), images, 7).num_prompt_tokens}


def test_another_spelling_of_the_image_token_is_as_good(sighted: ModelCard, tmp_path: Any) -> None:
    card = make_card(tmp_path, image_token=IMAGE_TOKEN)
    spelled = card.tokenizer_path.read_text().replace("<｜image｜>", "<｜deepseek_image｜>")
    card.tokenizer_path.write_text(spelled)
    other, plain = Converter(card), Converter(sighted)
    body = body_of(CHAT, "<｜image｜> <｜deepseek_image｜>", RED)
    assert list(read(other, CHAT, body).tokens) == list(read(plain, CHAT, body).tokens)
    card = make_card(tmp_path, image_token=300)
    with pytest.raises(CardError, match="image_token_id 300"):
        Converter(card)


def test_the_models_say_whether_they_see(eyes: Converter, converter: Converter) -> None:
    for sees, those in ((True, eyes), (False, converter)):
        model = json.loads(those.models(b'{"model": "tiny"}'))
        capabilities = ModelCapabilities.model_validate(model["capabilities"])
        assert capabilities.image_input.supported is sees
        assert capabilities.thinking.types.enabled.supported and not capabilities.batch.supported


urls = st.sampled_from([data_url(RED), "data:image/png;base64,", "https://x.org/y.png"])
odd = st.none() | st.integers() | st.text(max_size=8) | urls | st.sampled_from([{}, []])
names = st.sampled_from(["type", "url", "detail", "data", "media_type", "file_id", "text", "image_url", "source"])
words = st.sampled_from(["base64", "url", "file", "image/png", in_base64(RED)])
values = st.dictionaries(names, odd | words, max_size=4) | st.builds(lambda url: {"url": url}, urls)
kinds = st.sampled_from(["image_url", "input_image", "image", "text", "input_text", "tool_result"])
blocks = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    kinds,
    st.dictionaries(names.filter(lambda name: name != "type"), odd | values, max_size=3),
)


@given(some=st.lists(blocks, max_size=3), protocol=st.sampled_from(GENERATING))
@settings(max_examples=150, deadline=None)
def test_any_block_is_taken_or_refused(eyes: Converter, some: list[Any], protocol: Protocol) -> None:
    name = "input" if protocol is RESPONSES else "messages"
    turns = [{"role": "user", "content": some}, {"role": "user", "content": "x"}]
    try:
        draft = read(eyes, protocol, {"model": "tiny", name: turns})
    except Refusal as refusal:
        assert refusal.failure.code in (Code.BAD_REQUEST, Code.UNSUPPORTED)
        return
    assert list(draft.tokens).count(IMAGE_TOKEN) == len(draft.images)


def test_others_branch_off_behind_the_rows_of_earlier_images(eyes: Converter) -> None:
    (user,) = eyes.tokenizer.encode("<｜User｜>")
    body = body_of(CHAT, "look", RED)
    body["messages"] += [{"role": "assistant", "content": "Red."}, {"role": "user", "content": "Sure?"}]
    made = eyes.finish(read(eyes, CHAT, body), [resolved(50)], 7)
    assert made.branches == [i + 1 for i, id in enumerate(tokens_of(made)) if id == user]
    assert made.branches[1] > 52


# exact


@pytest.mark.parametrize("protocol", GENERATING)
def test_exact_travels_and_is_false_where_nothing_is_said(converter: Converter, protocol: Protocol) -> None:
    for fields, expected in (({}, False), ({"exact": None}, False), ({"exact": False}, False), ({"exact": True}, True)):
        prepared = converter.finish(read(converter, protocol, body_of(protocol, "x", **fields)), [], 7)
        assert prepared.exact is expected
    for wrong in (1, 0, "true", [], {}):
        failure = refused(converter, protocol, body_of(protocol, "x", exact=wrong))
        assert (failure.code, failure.field) == (Code.BAD_REQUEST, "exact")
