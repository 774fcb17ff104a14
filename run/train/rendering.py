"""Examples as tokens: the prompt that the service makes of the request, then the answer as the template spells it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from actors.vision.images import prepare
from kernels.config import ModelConfig
from run.tokenizer import ASSISTANT, DSML, EOS, THINK_END
from run.train.example import Example
from schemas.api import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation to learn from.

    `tokens` uint16 [n]; `targets` bool [n], True on every token that an assistant must produce, in earlier turns too:
    all behind the two tokens of the template that open its turn, up to and with EOS. `images`: of each the position of
    its first token and its pixels uint8 [height, width, 3], of the size that the service would bring it to.
    """

    tokens: npt.NDArray[np.uint16]
    targets: npt.NDArray[np.bool_]
    images: list[tuple[int, npt.NDArray[np.uint8]]]


class Renderer:
    """Renders examples for the model in a checkpoint folder, with its tokenizer. Raises CardError, ConfigError."""

    def __init__(self, folder: str | Path) -> None:
        self._converter = Converter(ModelCard.from_folder(folder))
        self._tokenizer = self._converter.tokenizer
        self._vision = ModelConfig.from_folder(folder).vision
        self._assistant, self._dsml, self._eos, self._think_end = (
            self._tokenizer.encode(text)[0] for text in (ASSISTANT, DSML, EOS, THINK_END)
        )
        self._encode = functools.lru_cache(maxsize=4096)(lambda text: list(self._tokenizer.encode(text)))

    def render(self, example: Example) -> Sample:
        """The example as the model would see and say it.

        Raises Refusal where the service would refuse the request.
        """
        prompt, images = self._prompt(example.request)
        answer = self._answer(example)
        tokens = np.concatenate((prompt, answer)).astype(np.uint16)
        targets = np.zeros(len(tokens), dtype=bool)
        (turns,), (ends,) = np.nonzero(tokens == self._assistant), np.nonzero(tokens == self._eos)
        for turn, end in zip(turns, ends, strict=True):
            targets[turn + 2 : end + 1] = True
        return Sample(tokens, targets, images)

    def _prompt(self, request: dict[str, Any]) -> tuple[npt.NDArray[np.int64], list[tuple[int, npt.NDArray[np.uint8]]]]:
        """The prompt's tokens with each image token repeated for its image, and the images."""
        body = orjson.dumps({"model": self._converter.card.name, **request})
        draft = self._converter.read(Protocol.CHAT_COMPLETIONS, body)
        tokens = draft.tokens.astype(np.int64)
        if not draft.images or self._vision is None:
            return tokens, []
        prepared = [prepare(source.data, self._vision) for source in draft.images]
        (positions,) = np.nonzero(tokens == self._converter.card.image_token)
        repeats = np.ones(len(tokens), dtype=np.int64)
        repeats[positions] = [image.plan.num_tokens for image in prepared]
        starts = (np.cumsum(repeats) - repeats)[positions]
        return np.repeat(tokens, repeats), [(int(at), image.pixels) for at, image in zip(starts, prepared, strict=True)]

    def _answer(self, example: Example) -> list[int]:
        """The assistant's turn from behind its opening to EOS (spec recipe.md §3.1)."""
        answer, found = example.answer, list[int]()
        if example.request["thinking"]["type"] == "enabled":
            found = [*self._encode(answer.get("reasoning_content") or ""), self._think_end]
        text = (answer.get("content") or "") + _calls(answer.get("tool_calls") or [])
        for number, piece in enumerate(text.split(DSML)):
            found += [self._dsml] * (number > 0) + self._encode(piece)
        return [*found, self._eos]


def _calls(calls: list[dict[str, Any]]) -> str:
    """The block of tool calls, empty without any."""
    if not calls:
        return ""
    invokes = "\n".join(_invoke(call["function"]) for call in calls)
    return f"\n\n<{DSML} calls>\n{invokes}\n</{DSML} calls>"


def _invoke(function: dict[str, str]) -> str:
    parameters = "\n".join(
        f'<{DSML} parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML} parameter>"
        for key, value in json.loads(function["arguments"]).items()
    )
    return f'<{DSML} invoke name="{function["name"]}">\n{parameters}\n</{DSML} invoke>'
