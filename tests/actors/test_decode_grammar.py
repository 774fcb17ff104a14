"""Where a request is in its grammar: masks with drafts, control tokens that nothing else spells, and what ends it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from actors.decode.actor import Decode
from actors.decode.grammar import Grammars
from actors.recipe.calls import Tool
from actors.recipe.grammar import Asked
from actors.rules.grammars import head
from actors.rules.vocabulary import tokens
from kernels.engine import Chunk, Sampling
from kernels.local import LocalEngine
from kernels.schedule import Mode
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.request import Failed, Finished, FinishReason
from schemas.request import Sampling as RequestSampling
from tests.actors.builders import submit
from tests.actors.constrained import (
    END,
    MARKS,
    VOCABULARY,
    allowed,
    followed,
    generate,
    grammars,
    text_of,
    tokenizer_file,
)
from tests.actors.core import core, info
from tests.untrained import untrained

NUM_NEW = 20
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
TOOLS = (Tool("f", json.dumps({"properties": {"a": {"type": "string"}}, "required": ["a"]})),)


def answer() -> str:
    return grammars().find(Asked(json=json.dumps(SCHEMA), thinks=True)).text


def calls() -> str:
    return grammars().find(Asked(tools=TOOLS, thinks=True)).text


def spelled(text: str) -> list[int]:
    """A text in the bytes of its characters, none of them a control token."""
    texts, special = tokens(tokenizer_file(), VOCABULARY)
    by_byte = {text: id for id, text in enumerate(texts) if len(text) == 1 and id not in special}
    return [by_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("seed", range(8))
def test_masks_behind_drafts_are_those_that_come_then(seed: int) -> None:
    chance = random.Random(seed)
    text = calls() if seed % 2 else answer()
    output = None
    while output is None:
        output = generate(followed().follow(text), chance)
    output = [*output, END]
    ahead, slow = followed().follow(text), followed().follow(text)
    for place in range(len(output)):
        drafts = output[place : place + 4]
        if chance.random() < 0.5:
            drafts[chance.randrange(len(drafts))] = chance.randrange(VOCABULARY)
        rows = ahead.allow(drafts)
        one = slow.allow([])[0]
        assert (rows[0] == one).all()
        right = 0
        while right < len(drafts) and drafts[: right + 1] == output[place : place + right + 1]:
            right += 1
        assert len(rows) > right
        then = followed().follow(text, output[: place + right])  # as where it has moved to
        assert (rows[right] == then.allow([])[0]).all()
        if right < len(drafts):
            assert (len(rows) > right + 1) is bool(drafts[right] in allowed(rows[right]))
        ahead.accept([output[place]])
        slow.accept([output[place]])
    assert allowed(ahead.allow([END, 5])[0]).tolist() == [END]
    ahead.accept([5])  # behind the end anything may be sampled
    assert ahead.error == ""


@pytest.mark.parametrize(("begin", "spelling"), [("thinking <", "</think>"), ("words <", "｜DSML｜")])
def test_nothing_else_spells_a_control_token(begin: str, spelling: str) -> None:
    """What is made of the output would take it for one."""
    texts, special = tokens(tokenizer_file(), VOCABULARY)
    words = [(id, text) for id, text in enumerate(texts) if id not in special]
    grammar = followed().follow(calls(), [] if spelling == "</think>" else [MARKS.think_end])
    grammar.accept(spelled(begin))
    parts = spelled(spelling)
    for num, part in enumerate(parts):
        begun, ids = spelling.encode()[:num], allowed(grammar.allow([])[0])
        ends_it = [id for id, text in words if spelling.encode() in begun + text]
        assert not set(ids) & set(ends_it)
        assert (part in ids) is (num + 1 < len(parts)) is (part not in ends_it)
        assert (MARKS.think_end in ids) is (spelling == "</think>")
        grammar.accept([part])
    assert grammar.error == ""


def test_where_only_a_control_token_could_be_spelled_it_ends() -> None:
    grammar = followed().follow(head([MARKS.think_end]) + 'start: "a</think>b"\n')
    for token in spelled("a</think"):
        assert token in allowed(grammar.allow([])[0])
        grammar.accept([token])
    assert not len(grammar.allow([]))
    assert grammar.error == "nothing is allowed here"


def test_a_draft_that_leads_nowhere_does_not_end_it() -> None:
    grammar = followed().follow(head([MARKS.think_end]) + 'start: "a" ("</think>" | "b")\n')
    rows = grammar.allow(spelled("a</think"))
    assert len(rows) == len("a</think")
    assert grammar.error == ""
    grammar.accept(spelled("ab"))
    assert allowed(grammar.allow([])[0]).tolist() == [END]


def test_drafts_beyond_the_limits_do_not_end_it_however_often_they_come() -> None:
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(700)}}
    grammar = followed().follow(head([MARKS.think_end]) + f'start: "a" "b" | wide\nwide: %json {json.dumps(wide)}\n')
    for _ in range(4):
        assert grammar.error == "" and len(grammar.allow(spelled("{ ")))
    assert len(grammar.allow(spelled("a"))) == 1, "from then on none are looked at"
    grammar.accept(spelled("ab"))
    assert allowed(grammar.allow([])[0]).tolist() == [END] and grammar.error == ""


def test_a_grammar_beyond_the_limits_says_so() -> None:
    """Only that one: another of the same replica goes on."""
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(700)}}
    grammar = followed().follow(head([]) + f"start: %json {json.dumps(wide)}")
    assert len(grammar.allow(spelled("{ ")))
    grammar.accept(spelled("{"))
    assert not len(grammar.allow([]))
    assert "max is 2000" in grammar.error
    broken = followed().follow("start: nothing")
    assert broken.error and not len(broken.allow([]))
    assert len(followed().follow(answer()).allow([])) == 1


def test_who_uses_up_the_limits_of_a_grammar_does_so_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is shared, with its lexer: one that is used up is used up for all."""
    monkeypatch.setattr("actors.rules.grammars.LIMITS", LLParserLimits(max_lexer_states=600, verbose_errors=False))
    text = head([]) + "start: /(.*a.{30}){5}/"

    def use_up() -> str:
        spent, chance = followed().follow(text), random.Random(0)
        while len(rows := spent.allow([])):
            spent.accept([int(chance.choice([id for id in allowed(rows[0]) if id != END]))])
        return spent.error

    other, early = followed().follow(text), followed().follow(text, spelled("abc"))
    assert "too many states" in use_up()
    fresh = followed().follow(text)
    for one in (other, early, fresh):
        assert len(one.allow([])) == 1
        one.accept(spelled("xa"))
        assert one.error == ""
    assert (early._num_renewals, fresh._num_renewals) == (1, 0)
    assert [fresh._renew() for _ in range(3)] == [True, True, False], "it costs the others of the batch"


def test_the_last_ones_are_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.decode.grammar.KEPT", 2)
    a, b, c = (head([]) + f"start: /{letter}/" for letter in "abc")
    for text in (a, b, a, c):
        followed().follow(text)
    assert [*followed()._compiled] == [a, c]


def test_a_control_token_begins_no_spelling() -> None:
    """What is made of the output looks behind it: its last character is none of another one."""
    grammar = followed().follow(head([MARKS.dsml]) + f"start: <[{MARKS.dsml}]> /(?s:.*)/")
    grammar.accept([MARKS.dsml])
    for part in spelled("DSML｜"):
        assert part in allowed(grammar.allow([])[0])
        grammar.accept([part])


def test_without_a_tokenizer_there_are_none() -> None:
    with pytest.raises(RuntimeError, match="without a tokenizer"):
        Grammars(None, VOCABULARY, END).follow("start: /a/")


def test_a_request_whose_grammar_fails_ends_alone_and_says_why() -> None:
    good = grammars().find(Asked(json='{"const": "x"}')).text
    texts = {"bad": head([MARKS.think_end]) + 'start: "a</think>b"\n', "good": good}

    async def main() -> None:
        async with core(1, 0) as system:
            engine = TimedEngine(info(vocab_size=VOCABULARY), range(3, 1000), StepCost(step_ns=10_000_000))
            bus, bulk = await system.bus("decode/d0"), await system.bulk("decode/d0")
            await system.add(Decode("d0", bus, bulk, engine, tokenizer=tokenizer_file()))
            asked = [
                submit(name, 20, 30, sampling=RequestSampling(temperature=1.0, top_p=1.0, seed=3, grammar=text))
                for name, text in texts.items()
            ]
            (_, bad), (output, end) = await asyncio.gather(*map(system.finish, asked))
            assert isinstance(bad, Failed) and bad.failure.code is Code.INTERNAL
            assert "cannot be kept to what was asked for" in bad.failure.message
            assert "nothing is allowed here" in bad.failure.message
            assert (text_of(output), end) == ('"x"', Finished(reason=FinishReason.STOP))

    run_virtual(main())


def test_an_engine_gives_the_same_with_drafts_and_without() -> None:
    """The untrained model, whose drafts a grammar leaves little of: so it is the masks that are tried."""

    async def output(drafts: Mode) -> dict[str, list[int]]:
        local = LocalEngine(untrained(), num_slots=4, max_step_tokens=512, drafts=drafts)
        await local.start()
        path = untrained() / "tokenizer.json"
        followed = Grammars(path, local.info.vocab_size, local.info.eos_token)
        texts = {
            "greedy": (Sampling(0.0, 1.0, 0), grammars().find(Asked(json=json.dumps(SCHEMA))).text),
            "hot": (Sampling(1.0, 1.0, 5), grammars().find(Asked(tools=TOOLS, must_call=True, is_in_calls=True)).text),
        }
        found: dict[str, list[int]] = {name: [] for name in texts}
        prompt = np.arange(100, 120, dtype=np.uint32)
        for name, (sampling, text) in texts.items():
            local.admit(name, 20 + NUM_NEW + 8, sampling)
            local.constrain(name, followed.follow(text))
        await local.prefill([Chunk(name, prompt) for name in texts])
        while running := [name for name in texts if END not in found[name] and len(found[name]) < NUM_NEW]:
            for name, new in zip(running, await local.decode(running), strict=True):
                found[name] += new
        await local.close()
        for made in found.values():
            del made[made.index(END) if END in made else NUM_NEW :]
        return found

    async def main() -> None:
        plain, drafted = await output("off"), await output("fixed")
        assert plain == drafted
        assert json.loads(text_of(plain["greedy"]))["a"] in ("yes", "no")
        assert text_of(plain["hot"]).startswith('<｜DSML｜ invoke name="f">\n<｜DSML｜')

    asyncio.run(main())
