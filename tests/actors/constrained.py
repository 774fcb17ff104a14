"""Output by chance within a grammar, and schemas by chance: no model is needed to see what a grammar lets through."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepseek_recipe as library
import numpy as np
from tokenizers import Tokenizer

from actors.decode.grammar import Grammar
from actors.decode.grammar import Grammars as Followed
from actors.recipe.grammar import Grammars
from actors.recipe.trial import Marks
from actors.rules.vocabulary import tokens
from run.tokenizer import train

END, VOCABULARY = 1, 1024
MARKS = Marks(think_end=1012, dsml=1013)
"""Of the tokenizer that `make_card` trains."""

_CLOSING = ('"', "}", "]", "</", ", ", "\n", "true", "null", "1")


@functools.cache
def grammars() -> Grammars:
    return Grammars(MARKS)


@functools.cache
def tokenizer_file() -> Path:
    """As `make_card` trains it; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(VOCABULARY).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@functools.cache
def followed() -> Followed:
    return Followed(tokenizer_file(), VOCABULARY, END)


@functools.cache
def _closing() -> np.ndarray:
    """The tokens that tend to bring an output to its end."""
    texts, special = tokens(tokenizer_file(), VOCABULARY)
    ids = [id for id, text in enumerate(texts) if text.startswith(tuple(c.encode() for c in _CLOSING))]
    return np.asarray(sorted({*ids, *special}))


def allowed(bits: np.ndarray) -> np.ndarray:
    """The ids in one row of bits."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def generate(grammar: Grammar, chance: random.Random, *, most: int = 600, bias: float = 0.5) -> list[int] | None:
    """An output by chance; None when it did not come to its end. It tends to, the more so the longer it is."""
    output: list[int] = []
    while len(output) < most:
        rows = grammar.allow([])
        assert len(rows), grammar.error
        ids = allowed(rows[0])
        assert len(ids)
        closing = np.intersect1d(ids, _closing())
        if END in ids and (len(ids) == 1 or chance.random() < 0.3):
            return output
        is_closing = len(closing) and chance.random() < max(bias, len(output) / most)
        token = int(chance.choice(closing if is_closing else ids))
        if token == END:
            return output
        grammar.accept([token])
        output.append(token)
    return None


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON Schema of the kinds that requests have."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "text", "free"]
    kinds += ["object", "object", "array", "anyOf", "ref", "map", "allOf"] if depth < 3 else []
    return globals()[f"_{chance.choice(kinds)}"](chance, depth)


def object_schema(chance: random.Random) -> dict[str, Any]:
    """One of an object, as tools have."""
    return _object(chance, 0)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string", "description": "Some text, </think>"}
    least = chance.randrange(4)
    if chance.random() < 0.4:
        found["minLength"] = least
    if chance.random() < 0.4:
        found["maxLength"] = least + chance.randrange(8)
    return found


def _text(chance: random.Random, depth: int) -> dict[str, Any]:
    ways = [{"pattern": "^[a-z]{2,5}$"}, {"pattern": "\\d+-\\w"}, {"pattern": "^(a|bb|[^x])*/$"}, {"pattern": "é|ü$"}]
    ways += [{"format": form} for form in ("date", "date-time", "uuid", "email", "ipv4", "int32", "time")]
    return {"type": "string", **chance.choice(ways)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(-50, 50)
    ways: list[dict[str, Any]] = [{}, {"minimum": least, "maximum": least + chance.randrange(100)}]
    ways += [{"exclusiveMinimum": least}, {"multipleOf": 3}, {"maximum": least}]
    return {"type": "integer", **chance.choice(ways)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [{}, {"minimum": -1.5, "maximum": 2}, {"exclusiveMaximum": 0}, {"multipleOf": 0.5}]
    return {"type": "number", "title": "N", **chance.choice(ways)}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["null", ["null", "string"], ["integer", "null", "boolean"]])}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", "ab", "a b", 'q"', "back\\", "", "é", 1, 2.5, -3, True, None, {"x": [1, {"y": None}]}, [], "n\n"]
    some = chance.sample(values, chance.randrange(1, 6))
    return {"const": some[0]} if chance.random() < 0.3 else {"enum": some}


def _free(chance: random.Random, depth: int) -> dict[str, Any]:
    return chance.choice([{}, {"description": "Anything"}, {"type": "object"}, {"type": "array"}])


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array", "items": schema(chance, depth + 1)}
    if chance.random() < 0.3:
        found["prefixItems"] = [schema(chance, depth + 1), {"type": "boolean"}]
    if chance.random() < 0.4:
        found["minItems"] = chance.randrange(3)
    if chance.random() < 0.4:
        found["maxItems"] = found.get("minItems", 0) + chance.randrange(3)
    return found


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "b", "name", "x-y", "with space", "ü", 'q"k', "$ref", "type"], chance.randrange(5))
    found: dict[str, Any] = {"type": "object", "properties": {name: schema(chance, depth + 1) for name in names}}
    found["required"] = [name for name in names if chance.random() < 0.5]
    rest = chance.random()
    if rest < 0.5:
        found["additionalProperties"] = False
    elif rest < 0.7:
        found["additionalProperties"] = schema(chance, depth + 1)
    elif rest < 0.8:
        found["required"].append("undeclared")
    return found


def _map(chance: random.Random, depth: int) -> dict[str, Any]:
    member = schema(chance, depth + 1)
    if chance.random() < 0.5:
        return {"type": "object", "patternProperties": {"^k[0-9]": member}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": member, "minProperties": 1}


def _anyOf(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]}


def _allOf(chance: random.Random, depth: int) -> dict[str, Any]:
    second = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    return {"allOf": [{"type": "object", "properties": {"a": schema(chance, depth + 1)}}, second]}


def _ref(chance: random.Random, depth: int) -> dict[str, Any]:
    """Into the definitions that `with_definitions` adds."""
    return {"$ref": chance.choice(["#/$defs/leaf", "#/$defs/tree", "#/definitions/list"])}


def with_definitions(found: dict[str, Any]) -> dict[str, Any]:
    """A whole schema, with what `_ref` names."""
    tree = {"type": "object", "properties": {"v": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#/$defs/tree"}}}
    tree |= {"required": ["v"], "additionalProperties": False}
    items = {"type": "array", "items": {"anyOf": [{"$ref": "#/definitions/list"}, {"type": "integer"}]}, "maxItems": 3}
    return {**found, "$defs": {"leaf": {"enum": ["l", 1]}, "tree": tree}, "definitions": {"list": items}}


def text_of(output: Sequence[int]) -> str:
    """What an output says, control tokens included; one that is cut may end within a character."""
    texts, _ = tokens(tokenizer_file(), VOCABULARY)
    return b"".join(texts[token] for token in output).decode(errors="replace")


def accepts(grammar: str, text: str) -> bool:
    """Whether this is a whole output, in the tokens that the tokenizer cuts it into."""
    at = followed().follow(grammar)
    for token in [*_tokenizer().encode(text, add_special_tokens=False).ids, END]:
        if token not in allowed(at.allow([])[0]):
            return False
        at.accept([token])
    return True


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file()))


@functools.cache
def _library_tokenizer() -> Any:
    return library.Tokenizer.from_file(str(tokenizer_file()))


def parsed(body: dict[str, Any], output: Sequence[int]) -> dict[str, Any]:
    """The message that a client of Chat Completions gets."""
    options = library.ConversionOptions().with_model_alias("tiny", library.ModelVersion.DeepseekV41Flash)
    request = library.ChatCompletionRequest(json.dumps({"model": "tiny", **body})).convert(options)
    generator = library.ChatCompletionRequest.chunk_generator(request, "id", "tiny")
    processor = library.StreamProcessor(generator, request.parsing_options, _library_tokenizer())
    answer = library.ChatCompletionResponse("id", "tiny", 0, 1, 0)
    events = list(processor.push(library.InferenceChunk.ready()))
    for token in output:
        events += processor.push(library.InferenceChunk.tokens([token]))
    events += processor.push(library.InferenceChunk.finish(library.InferenceFinishReason.Stop))
    for event in [*events, *processor.finish()]:
        answer.accumulate(event)
    message: dict[str, Any] = json.loads(answer.to_json())["choices"][0]["message"]
    return message
