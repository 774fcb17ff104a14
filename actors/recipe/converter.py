"""The input side of a request: a public body becomes a prompt in tokens, with sampling and limits."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as library
import numpy as np
import numpy.typing as npt
import orjson
from msgspec import structs

from actors.recipe.card import CardError, ModelCard
from actors.recipe.complaints import complaint, said
from actors.recipe.fields import Refusal
from actors.recipe.grammar import Asked, Grammars
from actors.recipe.images import Source, check_room, expand, number_of
from actors.recipe.normalise import Normal, normalise, parse
from actors.recipe.protocol import REQUESTS
from actors.recipe.submission import Submission
from actors.recipe.trial import Marks
from actors.rules.vocabulary import ragged, vocabulary
from schemas.api import Call, Protocol
from schemas.bulk import Payload
from schemas.failure import Code
from schemas.request import Limits, Sampling, Submit
from schemas.vision import Image, ImageResolved

_BOUNDED_BYTES = 64 * 1024
"""Prompts above this are first held against a bound that needs no encoding."""


@dataclass(frozen=True)
class Draft:
    """A body understood, all but its images: `tokens` has one image token for each of `images`, in this order."""

    protocol: Protocol
    normal: Normal
    request: Any
    asked: Asked
    tokens: npt.NDArray[np.uint32]
    images: list[Source]
    echo: Any = None
    namespaces: Any = None


@dataclass(frozen=True)
class Prepared:
    """A request ready to be computed. `prompt` is the token ids as little-endian u32."""

    protocol: Protocol
    model: str
    prompt: bytes
    num_prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    is_stream: bool
    ignored: list[str]
    images: list[Image]
    exact: bool
    branches: list[int]
    request: Any
    echo: Any = None
    namespaces: Any = None

    def submission(self, call: Call, recipe: str, cache: str) -> Submission:
        """What gives the request to an entrypoint shard."""
        submit = Submit(
            request_id=call.request_id,
            recipe=recipe,
            tenant=call.tenant,
            prompt=Payload(),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            limits=Limits(max_tokens=self.max_tokens, deadline_ns=call.deadline_ns, min_tokens=self.min_tokens),
            images=self.images,
            exact=self.exact,
            cache=cache,
            branches=self.branches,
        )
        return Submission(submit, self.prompt)

    def attributes(self) -> dict[str, str | int | float | bool]:
        """For the span (GenAI conventions, spec bus.md §3.1)."""
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "shoal",
            "gen_ai.request.model": self.model,
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.request.temperature": self.sampling.temperature,
            "gen_ai.request.top_p": self.sampling.top_p,
            "gen_ai.request.seed": self.sampling.seed,
            "gen_ai.request.stream": self.is_stream,
            "gen_ai.usage.input_tokens": self.num_prompt_tokens,
            "shoal.request.num_images": len(self.images),
        }


class Converter:
    """One model's card with its tokenizer, loaded. Safe to call from a thread: all it remembers is grammars.

    Raises CardError when the two do not agree.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        try:
            self.tokenizer = library.Tokenizer.from_file(str(card.tokenizer_path))
        except RuntimeError as error:
            raise CardError(f"{card.tokenizer_path}: not a tokenizer: {error}") from None
        special = self._special_tokens()
        self._encoding = library.DeepseekV41Encoding().with_tokenizer(self.tokenizer).with_special_tokens(special)
        names = dict.fromkeys(card.names, library.ModelVersion.DeepseekV41Flash)
        options = library.ConversionOptions(
            default_thinking_mode=card.thinking_default,
            messages_web_search=library.WebSearchBehavior.Reject,
            responses_web_search=library.WebSearchBehavior.Reject,
        )
        self._options = options.with_model_versions_by_name(names).with_special_tokens(special)
        self._user_token = self._id_of(special, library.SpecialToken.User)
        ends = (library.SpecialToken.ThinkingEnd, library.SpecialToken.Dsml)
        self.grammars = Grammars(Marks(*(self._id_of(special, token) for token in ends)))
        self.ragged = ragged(vocabulary(card.tokenizer_path))

    def _special_tokens(self) -> Any:
        """The library's spellings, but the image token as this tokenizer spells it: its id is what counts."""
        if not self.card.has_vision:
            return library.SpecialTokens()
        added = orjson.loads(self.card.tokenizer_path.read_bytes()).get("added_tokens", [])
        image = next((token["content"] for token in added if token["id"] == self.card.image_token), None)
        if image is None:
            path = self.card.tokenizer_path
            raise CardError(f"{path}: image_token_id {self.card.image_token} of config.json is no added token here")
        return library.SpecialTokens(image=image)

    def _id_of(self, special: Any, token: Any) -> int:
        ids = self.tokenizer.encode(special.token(token))
        if len(ids) != 1:
            raise CardError(f"{self.card.tokenizer_path}: {special.token(token)} is {len(ids)} tokens here, not one")
        return int(ids[0])

    def read(self, protocol: Protocol, body: bytes) -> Draft:
        """Parse, check, convert and encode. Raises Refusal."""
        normal = normalise(protocol, parse(body), self.card)
        request, echo, namespaces = self._convert(protocol, normal)
        conversation = normal.form.conversation(request)
        tokens = np.asarray(self._encode(conversation, len(body)), dtype="<u4")
        images = self._in_order(conversation, normal.images)
        asked = normal.form.asked(protocol, request)
        return Draft(protocol, normal, request, asked, tokens, images, echo, namespaces)

    def is_quick(self, draft: Draft) -> bool:
        """Whether `finish` takes no time. Else it tries a grammar: milliseconds, at worst seconds."""
        return self.grammars.is_known(draft.asked)

    def finish(self, draft: Draft, resolved: Sequence[ImageResolved], seed: int) -> Prepared:
        """The request, now that its images are known. `seed` is used where the client gave none. Raises Refusal."""
        normal, request = draft.normal, draft.request
        prompt, images = expand(draft.tokens, self.card.image_token, draft.images, resolved)
        check_room(images, draft.images, len(prompt), self.card.context_tokens)
        try:
            max_tokens = request.resolve_max_tokens(len(prompt), self.card.context_tokens)
        except library.ConversionError as error:
            raise Refusal(Code.CONTEXT_LENGTH, said(error), _prompt_field(draft.protocol)) from None
        if normal.choice.logit_bias:
            normal.choice.check_tokens(self._num_tokens)
        grammar = self.grammars.find(draft.asked)
        sampling = normal.choice.sampling(request.inference_options, seed)
        return Prepared(
            protocol=draft.protocol,
            model=normal.model,
            prompt=prompt.tobytes(),
            num_prompt_tokens=len(prompt),
            sampling=structs.replace(sampling, grammar=grammar.text),
            max_tokens=max_tokens,
            min_tokens=normal.choice.least(max_tokens),
            is_stream=request.stream,
            ignored=sorted({*normal.ignored, *grammar.ignored}),
            images=images,
            exact=normal.exact,
            branches=branches(prompt, self._user_token),
            request=request,
            echo=draft.echo,
            namespaces=draft.namespaces,
        )

    def count(self, draft: Draft, resolved: Sequence[ImageResolved]) -> bytes:
        """The answer to `count_tokens` (Anthropic). Raises Refusal."""
        tokens, _ = expand(draft.tokens, self.card.image_token, draft.images, resolved)
        return orjson.dumps({"input_tokens": len(tokens)})

    def models(self, body: bytes) -> bytes:
        """The list of models, or the one named in the body as {"model": name}. Raises Refusal.

        One form that both the OpenAI and the Anthropic SDK read.
        """
        wanted = parse(body).get("model") if body else None
        if wanted is None:
            models = [self._model(name) for name in self.card.names]
            ends = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return orjson.dumps({"object": "list", "data": models, **ends})
        if wanted not in self.card.names:
            raise Refusal(Code.MODEL_NOT_FOUND, f"the model `{str(wanted)[:128]}` does not exist", "model")
        return orjson.dumps(self._model(wanted))

    def _model(self, name: str) -> dict[str, Any]:
        created = datetime.datetime.fromtimestamp(self.card.created_s, datetime.UTC)
        return {
            **{"id": name, "object": "model", "created": self.card.created_s, "owned_by": "shoal"},
            **{"type": "model", "display_name": self.card.name, "created_at": created},
            **{"max_input_tokens": self.card.context_tokens, "max_tokens": self.card.context_tokens},
            "capabilities": self.card.capabilities,
        }

    def _convert(self, protocol: Protocol, normal: Normal) -> tuple[Any, Any, Any]:
        """The library's request, and for Responses the echo and the map of namespaced tools."""
        try:
            request = REQUESTS[protocol](normal.body)
            echo = namespaces = None
            if protocol is Protocol.RESPONSES:
                said = normal.form.said
                echo = (REQUESTS[protocol](normal.body | said) if said else request).echo()
                namespaces = request.namespace_tool_map(self._options)
            if normal.form.must_call:
                freely = REQUESTS[protocol](normal.form.freely(normal.body)).convert(self._options)
                if freely.conversation.thinking_mode:
                    return freely, echo, namespaces
            return request.convert(self._options), echo, namespaces
        except (library.ConversionError, ValueError, OverflowError, RecursionError, TypeError) as error:
            raise complaint(protocol, error) from None

    @functools.cached_property
    def _longest_token_bytes(self) -> int:
        """Read when a long prompt asks for it. Byte-level BPE: one character of an entry is one byte of text."""
        return max(map(len, vocabulary(self.card.tokenizer_path)))

    @functools.cached_property
    def _num_tokens(self) -> int:
        """Read when a request names some by their ids."""
        read = orjson.loads(self.card.tokenizer_path.read_bytes())
        last: int = max([*read["model"]["vocab"].values(), *(token["id"] for token in read["added_tokens"])])
        return last + 1

    def _in_order(self, conversation: Any, images: list[Source]) -> list[Source]:
        """The images as the prompt has them: tool results are put into the order of their calls."""
        if not images:
            return []
        rendered = self._encoding.render_conversation(conversation)
        numbers = [number_of(source.data_url) for source in rendered.image_sources]
        if sorted(numbers) != list(range(len(images))):
            lost = next((image.path for number, image in enumerate(images) if number not in numbers), "")
            raise Refusal(Code.BAD_REQUEST, f"{lost}: an image cannot stand here", lost)
        return [images[number] for number in numbers]

    def _encode(self, conversation: Any, body_bytes: int) -> list[int]:
        limit = self.card.context_tokens
        if body_bytes > _BOUNDED_BYTES:
            text_bytes = len(self._encoding.render_conversation(conversation).prompt.encode())
            least = text_bytes // self._longest_token_bytes
            if least > limit:
                raise Refusal(
                    Code.CONTEXT_LENGTH,
                    f"This model's maximum context length is {limit} tokens. However, your prompt has {text_bytes} "
                    f"bytes, which is at least {least} tokens. Please shorten it.",
                )
        return list(self._encoding.encode(conversation))


def branches(prompt: npt.NDArray[np.uint32], user_token: int) -> list[int]:
    """How many tokens come before the text of the first and of the last user message (`Submit.branches`): others have
    the same system prompt, tools and examples, and ask something else. Text never encodes to `user_token`."""
    positions = np.flatnonzero(prompt == user_token)
    return sorted({int(positions[0]) + 1, int(positions[-1]) + 1}) if len(positions) else []


@functools.lru_cache(maxsize=1)
def load_converter(card: ModelCard) -> Converter:
    """The converter of a card. Kept: a large tokenizer takes a third of a second, and nothing else runs meanwhile."""
    return Converter(card)


def _prompt_field(protocol: Protocol) -> str:
    return "input" if protocol is Protocol.RESPONSES else "messages"
