"""The KV cache as a client sees it: real processes, real files, the SDKs; what was computed the actors' reports say."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from run.health import collect_loads, on_bus
from run.home import Home
from schemas.message import Role
from tests.stack.conftest import System, wait_for

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"
BLOCK = 128
Messages = list[dict[str, Any]]


def long_text(seed: int, num_words: int = 125) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(num_words))


def totals(system: System) -> dict[str, float]:
    """What prefill, decode and the store say of themselves, added up over the actors of each role."""

    async def collect() -> dict[str, float]:
        running = Home(system.folder / "home").read()
        assert running is not None
        async with on_bus(running.nats_url, name="test") as bus:
            reports = await collect_loads(bus, wait_s=0.2)
        found: dict[str, float] = {}
        for report in reports:
            if report.role in (Role.PREFILL, Role.DECODE, Role.METADATA, Role.WRITER):
                for name, value in report.detail.items():
                    found[f"{report.role} {name}"] = found.get(f"{report.role} {name}", 0) + value
        return found

    return asyncio.run(collect())


def settled(system: System) -> dict[str, float]:
    """The totals, once all blocks that were computed are known to metadata."""
    found: dict[str, float] = {}

    def is_settled() -> bool:
        found.update(totals(system))
        return found["metadata blocks"] == found["writer blocks"] and found == {**found, **totals(system)}

    wait_for(is_settled, 20.0)
    return found


def chat(ai: openai.OpenAI, messages: Messages, **fields: Any) -> Any:
    return ai.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 16, "temperature": 0, **fields}
    )


def cached_tokens(answer: Any) -> int:
    """Of a chat completion, by all the names that it has for them."""
    usage = answer.usage
    hit = usage.prompt_cache_hit_tokens
    assert usage.prompt_tokens_details.cached_tokens == hit
    assert usage.prompt_cache_miss_tokens == usage.prompt_tokens - hit
    return int(hit)


@pytest.mark.parametrize("question", ["And then?", long_text(10, 60)], ids=["short", "long"])
def test_a_second_turn_computes_its_new_tokens_only(stack: System, ai: openai.OpenAI, question: str) -> None:
    messages: Messages = [{"role": "user", "content": long_text(len(question))}]
    first = chat(ai, messages)
    num_first = first.usage.prompt_tokens
    assert cached_tokens(first) < BLOCK and num_first > 3 * BLOCK
    before = settled(stack)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": question},
    ]
    second = chat(ai, messages)
    after = totals(stack)
    hit = cached_tokens(second)
    # At least a block is computed: the decoder needs the last window whole. A block that the answer filled is hit only
    # if its text is cut into the same tokens again.
    longest = second.usage.prompt_tokens // BLOCK - 1
    assert hit in [min(length // BLOCK, longest) * BLOCK for length in (num_first, num_first + 15)]
    assert after["prefill computed_tokens"] - before["prefill computed_tokens"] == second.usage.prompt_tokens - hit
    assert after["prefill replayed_tokens"] == before["prefill replayed_tokens"]
    slot_bytes = 10_176 + 64
    assert after["prefill read_bytes"] - before["prefill read_bytes"] == hit // BLOCK * slot_bytes
    assert after["prefill snapshot_bytes"] > before["prefill snapshot_bytes"]
    assert chat(ai, messages, extra_body={"exact": True}).usage.prompt_cache_hit_tokens == 0


def test_thinking_of_earlier_turns_is_dropped_and_the_prefix_before_it_is_hit(stack: System, ai: openai.OpenAI) -> None:
    thinking = {"extra_body": {"thinking": {"type": "enabled"}}, "max_tokens": 40}
    messages: Messages = [{"role": "user", "content": long_text(2)}]
    num_before = 0
    for turn in range(3):
        answer = chat(ai, messages, **thinking)
        if turn:
            longest = num_before // BLOCK  # full blocks of the last prompt, but for its very end
            assert cached_tokens(answer) // BLOCK in (longest - 1, longest)
        num_before = answer.usage.prompt_tokens
        settled(stack)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or "Well."},
            {"role": "user", "content": long_text(20 + turn, 40)},
        ]


def test_the_same_answer_cold_and_hit_in_every_protocol(
    stack: System, ai: openai.OpenAI, sdk: anthropic.Anthropic
) -> None:
    text = long_text(3)

    def responses() -> tuple[str, int, int]:
        answer = ai.responses.create(model=MODEL, input=text, max_output_tokens=16, temperature=0)
        assert answer.usage is not None
        return answer.output_text, answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens

    def messages() -> tuple[str, int, int]:
        asked = [{"role": "user", "content": text}]
        answer = sdk.messages.create(  # type: ignore[call-overload]
            model=MODEL, max_tokens=16, messages=asked, extra_body={"temperature": 0}
        )
        usage = answer.usage
        assert usage.cache_creation_input_tokens in (0, None)
        return answer.content[0].text, usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens

    def completions() -> tuple[str, int, int]:
        answer = chat(ai, [{"role": "user", "content": text}])
        return answer.choices[0].message.content, answer.usage.prompt_tokens, cached_tokens(answer)

    cold, num_tokens, hit = completions()
    assert hit < BLOCK
    settled(stack)
    usable = (num_tokens // BLOCK - 1) * BLOCK
    for again in (completions, responses, messages):
        assert again() == (cold, num_tokens, usable)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
def test_a_stream_says_it_too(stack: System, ai: openai.OpenAI, sampling: dict[str, Any]) -> None:
    messages: Messages = [{"role": "user", "content": long_text(4 + len(sampling))}]

    def stream() -> tuple[str, int]:
        text, hit = "", -1
        for chunk in chat(ai, messages, stream=True, **sampling):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            hit = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage else hit
        return text, hit

    cold, none = stream()
    settled(stack)
    warm, hit = stream()
    assert warm == cold and none < BLOCK <= 2 * BLOCK <= hit


QUESTIONS = ["And you?", long_text(91, 60), long_text(92, 20), "Why? " * 40]


def ask(ai: openai.OpenAI, number: int, question: str) -> Any:
    system = {"role": "system", "content": long_text(95 + number)}
    return chat(ai, [system, {"role": "user", "content": question}])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of a system that was asked all QUESTIONS, stored their blocks, and was stopped; and its answers."""
    system = System(tmp_path_factory.mktemp("stopped"))
    try:
        with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
            answers = [ask(ai, number, question) for number, question in enumerate(QUESTIONS)]
        settled(system)
    finally:
        system.stop()
    return system.folder, answers


def test_another_question_behind_the_same_system_prompt_is_answered_as_if_it_were_the_first(
    stack: System, ai: openai.OpenAI, stopped: tuple[Path, list[Any]]
) -> None:
    cold = stopped[1]
    for number in range(len(QUESTIONS)):
        assert cached_tokens(ask(ai, number, long_text(93, 100))) == 0
    before = settled(stack)
    warm = [ask(ai, number, question) for number, question in enumerate(QUESTIONS)]
    after = totals(stack)
    assert [answer.choices[0].message.content for answer in warm] == [a.choices[0].message.content for a in cold]
    hits = [cached_tokens(answer) for answer in warm]
    assert all(hit >= 2 * BLOCK for hit in hits) and not any(map(cached_tokens, cold))
    assert after["prefill computed_tokens"] - before["prefill computed_tokens"] == sum(
        answer.usage.prompt_tokens - hit for answer, hit in zip(warm, hits, strict=True)
    )
    assert after["prefill replayed_tokens"] == before["prefill replayed_tokens"]


CLUSTER = """
[[process]]
name = "decode"
actors = ["decode/d0"]
[[process]]
name = "prefill"
actors = ["prefill/p0", "prefill/p1"]
[[process]]
name = "store"
actors = ["kvstore/k0", "writer/w0", "writer/w1"]
[[process]]
name = "shard"
actors = ["metadata/m1"]
[[process]]
name = "front"
actors = ["prefill-balancer/pb0", "decode-balancer/db0", "metadata/m0", "entrypoint/e0", "recipe/r0", "gateway/g0"]
"""


@pytest.mark.timeout(180)
def test_faults_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """Each kind of harm to the cache, on real processes: the same answers, and hits again afterwards."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    system = System(tmp_path, cluster=cluster)
    store = system.folder / "home" / "store"

    def kill(role: str) -> Callable[[], None]:
        return lambda: os.kill(system.pid(role), signal.SIGKILL)

    def flip() -> None:
        for slab in store.glob("*.slab"):
            with slab.open("r+b") as file:
                for offset in range(4096, slab.stat().st_size, 4096):
                    file.seek(offset)
                    file.write(b"\xa5")

    def truncate() -> None:
        for slab in store.glob("*.slab"):
            os.truncate(slab, 5000)

    harms: dict[str, Callable[[], None]] = {
        "a writer is killed": kill("writer"),
        "a metadata shard is killed": kill("metadata"),
        "slabs are damaged": flip,
        "slabs are truncated": truncate,
        "the folder is deleted": lambda: shutil.rmtree(store),
        "prefill is killed": kill("prefill"),
    }
    try:
        with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=20) as ai:
            for number, (harm, do) in enumerate(harms.items()):
                messages: Messages = [{"role": "user", "content": long_text(50 + number)}]
                cold = chat(ai, messages)
                settled(system)
                do()
                answers = [chat(ai, messages) for _ in range(2)]
                texts = {answer.choices[0].message.content for answer in answers}
                if "replay" not in harm and harm != "prefill is killed":  # its snapshots went with it: approximate
                    assert texts == {cold.choices[0].message.content}, harm
                wait_for(lambda: cached_tokens(chat(ai, messages)) >= BLOCK, 20.0)  # noqa: B023
            assert chat(ai, messages, extra_body={"exact": True}).choices[0].message.content is not None
    finally:
        assert system.stop() == 0


def test_blocks_outlive_a_restart(stopped: tuple[Path, list[Any]]) -> None:
    """Snapshots are gone then: what is hit is replayed, which is approximate: nobody promises the same answers."""
    system = System(stopped[0])
    try:
        with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
            answers = [ask(ai, number, question) for number, question in enumerate(QUESTIONS)]
            found = totals(system)
    finally:
        system.stop()
    assert all(cached_tokens(answer) >= BLOCK for answer in answers)
    assert all(answer.choices[0].message.content for answer in answers)
    assert found["prefill replayed_tokens"] == BLOCK * len(QUESTIONS)
