"""The official SDKs, unmodified, against the gateway: stream and not, and the errors they raise."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from deepseek_recipe import Tokenizer

from tests.stack.conftest import System
from tests.untrained import untrained

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"
HELLO = [{"role": "user", "content": "Say something."}]
GREEDY = {"temperature": 0}  # not a parameter of the Anthropic SDK any more, still one of the protocol


class TestOpenAI:
    def test_chat_stream_and_whole_agree(self, ai: openai.OpenAI) -> None:
        whole = ai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, temperature=0)
        stream = ai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text and text == whole.choices[0].message.content
        assert whole.usage is not None and whole.usage.completion_tokens <= 20
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert [usage.completion_tokens for usage in usages][-1] == whole.usage.completion_tokens

    def test_max_completion_tokens_and_developer_role_are_honoured(self, ai: openai.OpenAI) -> None:
        answer = ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "Be brief."}, *HELLO],
            max_completion_tokens=3,
            temperature=0,
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 3

    def test_a_seed_fixes_the_answer_and_another_changes_it(self, ai: openai.OpenAI) -> None:
        def ask(seed: int) -> str | None:
            answer = ai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=1, seed=seed)
            return answer.choices[0].message.content

        assert ask(1) == ask(1) != ask(2)

    def test_responses_stream_and_whole_agree(self, ai: openai.OpenAI) -> None:
        whole = ai.responses.create(model=MODEL, input="Say something.", max_output_tokens=20, temperature=0)
        text = ""
        with ai.responses.stream(model=MODEL, input="Say something.", max_output_tokens=20, temperature=0) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
        assert text and text == whole.output_text

    def test_models(self, ai: openai.OpenAI) -> None:
        assert [model.id for model in ai.models.list()] == [MODEL]
        assert ai.models.retrieve(MODEL).id == MODEL

    def test_wrong_model(self, ai: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            ai.chat.completions.create(model="gpt-9", messages=HELLO)

    def test_empty_messages(self, ai: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError):
            ai.chat.completions.create(model=MODEL, messages=[])

    def test_a_prompt_over_the_context_limit(self, ai: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"8192"):
            ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])

    def test_two_mebibytes_of_text(self, ai: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError):
            ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * (2 << 20)}])

    def test_control_token_strings_are_plain_text(self, ai: openai.OpenAI) -> None:
        def prompt_tokens(content: str) -> int:
            answer = ai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1
            )
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        plain = prompt_tokens("")
        for spelled in ("<｜User｜>", "<think>", "｜DSML｜", "<｜end▁of▁sentence｜>", "<｜image｜>"):
            assert prompt_tokens(spelled) > plain + 1


class TestAnthropic:
    def test_stream_and_whole_agree(self, sdk: anthropic.Anthropic) -> None:
        whole = sdk.messages.create(model=MODEL, messages=HELLO, max_tokens=20, extra_body=GREEDY)
        with sdk.messages.stream(model=MODEL, messages=HELLO, max_tokens=20, extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text and text == "".join(block.text for block in whole.content if block.type == "text")
        assert final.usage.output_tokens == whole.usage.output_tokens <= 20
        assert final.stop_reason == whole.stop_reason

    def test_count_tokens_is_what_is_then_used(self, sdk: anthropic.Anthropic) -> None:
        counted = sdk.messages.count_tokens(model=MODEL, messages=HELLO)
        used = sdk.messages.create(model=MODEL, messages=HELLO, max_tokens=1).usage.input_tokens
        assert counted.input_tokens == used

    def test_errors_are_its_own(self, sdk: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError):
            sdk.messages.create(model="another-9", messages=HELLO, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError):
            sdk.messages.create(model=MODEL, messages=[], max_tokens=1)


class TestSampling:
    """What the protocols say of sampling, and our own of it, from end to end."""

    def test_logprobs_are_the_same_in_a_stream_in_one_piece_and_in_responses(self, ai: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0, "logprobs": True}
        whole = ai.chat.completions.create(**asked, top_logprobs=3)
        assert whole.choices[0].logprobs is not None and whole.usage is not None
        entries = whole.choices[0].logprobs.content or []
        assert 0 < len(entries) <= whole.usage.completion_tokens
        for entry in entries:
            top = [one.logprob for one in entry.top_logprobs]
            assert len(top) == 3 and top == sorted(top, reverse=True) and entry.logprob <= top[0] <= 0
        streamed = []
        for chunk in ai.chat.completions.create(**asked, top_logprobs=3, stream=True):
            if chunk.choices and chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content or []
        assert streamed == entries
        with ThreadPoolExecutor(4) as pool:  # beside others
            jobs = [pool.submit(ai.chat.completions.create, **asked, top_logprobs=i % 4) for i in range(4)]
            said = [job.result().choices[0].logprobs for job in jobs]
        assert [[one.logprob for one in (each.content or [])] for each in said if each] == 4 * [
            [entry.logprob for entry in entries]
        ]
        answer = ai.responses.create(
            model=MODEL, input="Say something.", max_output_tokens=8, temperature=0, top_logprobs=3
        )
        content = answer.output[-1].content[0]
        assert [entry.model_dump() for entry in content.logprobs] == [entry.model_dump() for entry in entries]

    def test_an_answer_has_its_least(self, ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
        extra = {"ignore_eos": True}
        chat = ai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, seed=5, extra_body=extra)
        assert chat.usage is not None and chat.choices[0].finish_reason == "length"
        responses = ai.responses.create(model=MODEL, input="Hi", max_output_tokens=10, extra_body={"min_tokens": 10})
        assert responses.status == "incomplete"
        message = sdk.messages.create(model=MODEL, messages=HELLO, max_tokens=10, extra_body=extra)
        assert message.stop_reason == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="min_tokens"):
            ai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, extra_body={"min_tokens": 5})

    def test_stop_strings(self, ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
        greedy: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 16}
        text = ai.chat.completions.create(**greedy, temperature=0).choices[0].message.content or ""
        stop = text[len(text) // 2 :][:3]
        chat = ai.chat.completions.create(**greedy, temperature=0, stop=[stop])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
        message = sdk.messages.create(**greedy, stop_sequences=["\0", stop], extra_body=GREEDY)
        said = "".join(block.text for block in message.content if block.type == "text")
        assert (said, message.stop_reason, message.stop_sequence) == (text[: text.index(stop)], "stop_sequence", stop)
        assert chat.usage is not None and message.usage.output_tokens == chat.usage.completion_tokens < 16

    def test_what_may_be_sampled(self, ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 6}
        (token,) = Tokenizer.from_file(str(untrained() / "tokenizer.json")).encode("Hi")
        biased = ai.chat.completions.create(**asked, logit_bias={str(token): 100}, extra_body={"ignore_eos": True})
        assert biased.choices[0].message.content == 6 * "Hi"
        greedy = sdk.messages.create(**asked, extra_body=GREEDY).content
        likeliest = sdk.messages.create(**asked, extra_body={"top_k": 1, "temperature": 1}).content
        assert [block.text for block in likeliest] == [block.text for block in greedy]


class TestBareHttp:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": 3}', b"\xff\xfe"])
    def test_malformed_bodies_get_the_protocols_own_error(self, stack: System, path: str, body: bytes) -> None:
        answer = httpx.post(stack.http + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"

    def test_a_truncated_body_hurts_nobody(self, stack: System) -> None:
        host, port = stack.http.removeprefix("http://").split(":")
        before = stack.ready.pids
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{\"model\"")
        assert httpx.get(f"{stack.http}/health").status_code == 200
        assert stack.ready.pids == before

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
    def test_a_body_cut_short_gets_the_protocols_own_error(self, stack: System, path: str) -> None:
        host, port = stack.http.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{"model"'.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["type"] == "invalid_request_error"

    def test_request_id_is_echoed(self, stack: System) -> None:
        answer = httpx.get(f"{stack.http}/v1/models", headers={"x-request-id": "mine-7"})
        assert answer.headers["x-request-id"] == "mine-7"
        assert httpx.get(f"{stack.http}/v1/models").headers["x-request-id"]

    def test_unknown_paths(self, stack: System) -> None:
        answer = httpx.get(f"{stack.http}/v1/nothing")
        assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_sixty_four_streams_are_what_each_is_alone(stack: System) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as ai:

            async def ask(i: int) -> tuple[str, str]:
                stream = await ai.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"Number {i}. " + "more " * (i * 7 % 90)}],
                    max_tokens=8 + i % 9,
                    temperature=i % 2,
                    seed=i,
                    stream=True,
                )
                text, reason = "", ""
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
                return text, reason

            together = await asyncio.gather(*(ask(i) for i in range(64)))
            alone = [await ask(i) for i in range(0, 64, 7)]
            assert together[::7] == alone

    asyncio.run(main())
