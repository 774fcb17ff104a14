"""Questions become the prompts that the service would make: up to where the answer begins, images as rows."""

from __future__ import annotations

from tokenizers import Tokenizer

from kernels.config import ModelConfig
from run.evaluate.prompts import render
from run.evaluate.questions import Question, sampled
from run.settings import DEFAULT_MODEL
from run.tokenizer import ASSISTANT, THINK_END
from run.train.example import Example
from run.train.rendering import Renderer


def test_a_prompt_ends_where_the_answer_begins() -> None:
    turns = [("user", "Hello"), ("assistant", "Hi."), ("user", "Thanks")]
    messages = [{"role": role, "content": content} for role, content in turns]
    request = {"messages": messages, "thinking": {"type": "disabled"}}
    example = Example("about", request, {"role": "assistant", "content": "You are welcome."})
    (asked,) = render(DEFAULT_MODEL, [Question("about", 0, example)])
    sample = Renderer(DEFAULT_MODEL).render(example)
    num = len(asked.tokens)
    assert asked.tokens == sample.tokens[:num].tolist() and sample.targets[num:].all()
    assert sample.targets[:num].any(), "an earlier turn is a target too, and part of the prompt"
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    assert [tokenizer.id_to_token(token) for token in asked.tokens[-2:]] == [ASSISTANT, THINK_END]


def test_an_image_is_rows_where_its_tokens_are() -> None:
    config = ModelConfig.from_folder(DEFAULT_MODEL)
    (asked,) = render(DEFAULT_MODEL, sampled(["picture"], 1, "held-out"))
    ((at, rows),) = asked.images
    assert asked.tokens[at : at + len(rows)] == [config.image_token_id] * asked.tokens.count(config.image_token_id)
    assert rows.shape == (len(rows), config.hidden_size) and rows.dtype == "float32"
