"""The output side of a request: tokens become protocol events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from typing import Protocol as Interface

import deepseek_recipe as library

from actors.recipe.converter import Converter, Prepared
from actors.recipe.fields import Refusal
from actors.recipe.protocol import REASONS, REQUESTS, RESPONSES, response_id
from actors.rules.errors import error_body, error_event
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.request import FinishReason, TokenLogprobs


class _Event(Interface):
    def to_json(self) -> str: ...


_Said = list[tuple[float, list[tuple[int, float]]]]
"""The logprob of each token, and of the likeliest ones in its place, as the library wants them."""

_tokens = library.InferenceChunk.tokens
_TIMES = re.compile(rb'"(created_at|completed_at)":\d+')


class Session:
    """The output side of one request: tokens in, finished JSON out.

    In a stream the tokens that come together are one event, or few where the protocol's own borders lie among them
    (thinking and answer, a call and its arguments): how they are grouped shows in nothing but that. Other requests
    give one body at the end. Nothing is given before the first token or the end, so that a request that fails earlier
    can still be answered with a proper status.
    """

    def __init__(self, converter: Converter, prepared: Prepared, request_id: str, created_s: int) -> None:
        self.is_stream = prepared.is_stream
        self.is_stopped = False
        self.num_tokens = 0
        self.num_cached = 0  # of the prompt's tokens; said with the first of the answer's
        self._protocol = prepared.protocol
        self._request_id = request_id
        self._eos = converter.card.eos_token
        self._ragged = converter.ragged
        self.num_gathered = 0  # logprobs, until the answer ends: Chat Completions streams keep none
        self._gathers = prepared.protocol is Protocol.RESPONSES or not prepared.is_stream
        self._asks_logprobs = prepared.sampling.top_logprobs >= 0
        self._num_events = 0
        self._num_prompt_tokens = prepared.num_prompt_tokens
        id = response_id(prepared.protocol, request_id)
        generator = REQUESTS[prepared.protocol].chunk_generator(prepared.request, id, prepared.model)
        if prepared.protocol is Protocol.RESPONSES:
            generator = generator.with_echo(prepared.echo).with_namespace_tool_map(prepared.namespaces)
        options = prepared.request.parsing_options
        self._processor = library.StreamProcessor(generator, options, converter.tokenizer)
        self._scout: Any = None
        if options.stop_sequences:
            scouting = REQUESTS[prepared.protocol].chunk_generator(prepared.request, id, prepared.model)
            self._scout = library.StreamProcessor(scouting, options, converter.tokenizer)
        self._body: Any = None
        if not self.is_stream:  # how many tokens of the prompt were cached comes with the first event
            body = RESPONSES[prepared.protocol]
            self._body = body(id, prepared.model, created_s, prepared.num_prompt_tokens, 0)
        self._is_ready = False
        self._created_s = created_s
        # The library stamps events with the system's clock, in ten digits until the year 2286; ours can be another.
        head = b'{"id":"%b","object":"chat.completion.chunk","created":' % id.encode()
        self._head, self._head_bytes = head + b"%d," % created_s, len(head) + 11
        self._is_restamped = False

    @property
    def has_started(self) -> bool:
        """Whether an event has been given out."""
        return self._num_events > 0

    def push(self, tokens: list[int], logprobs: TokenLogprobs | None = None) -> list[bytes]:
        """The events of these tokens. After it `is_stopped` tells that a stop sequence has ended the answer.

        `logprobs` are of all of them. Raises Refusal(internal) if the library cannot go on, or logprobs are missing.
        """
        events: list[_Event] = [] if self._is_ready else self._ready()
        new = [token for token in tokens if token != self._eos]
        said = self._said(tokens, logprobs) if self._asks_logprobs else None
        try:
            if self._scout is not None:
                new = self._up_to_stop(new)
            for start, end in self._pieces(new):
                events += self._processor.push(_tokens(new[start:end], said and said[start:end]))
        except (RuntimeError, OverflowError) as error:
            raise Refusal(Code.INTERNAL, f"the output could not be decoded: {error}") from error
        self.num_tokens += len(new)
        self.is_stopped = self._processor.finished
        return self._take(events)

    def _said(self, tokens: list[int], logprobs: TokenLogprobs | None) -> _Said:
        """What is said of each token but the end."""
        sampled = logprobs.sampled if logprobs else []
        if len(sampled) != len(tokens):
            message = f"{len(tokens)} tokens came with {len(sampled)} logprobs"
            raise Refusal(Code.INTERNAL, message)
        pairs = list(zip(logprobs.top_tokens, logprobs.top, strict=True)) if logprobs else []
        num_top = len(pairs) // max(len(sampled), 1)
        if self._gathers:
            self.num_gathered += len(sampled) + len(pairs)
        return [
            (one, pairs[i * num_top : (i + 1) * num_top])
            for i, (token, one) in enumerate(zip(tokens, sampled, strict=True))
            if token != self._eos
        ]

    def _pieces(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """(start, end) of what to push at once: of tokens that end within a character the library would hold back all,
        so the last ones that may, mostly none, go one by one."""
        whole = len(tokens)
        while whole and tokens[whole - 1] in self._ragged:
            whole -= 1
        if whole:
            yield 0, whole
        for i in range(whole, len(tokens)):
            yield i, i + 1

    def _up_to_stop(self, tokens: list[int]) -> list[int]:
        """The tokens up to the one that ends a stop sequence: of one push the library counts all, and so would a bill.

        The scout gets them one by one, and its events are nobody's.
        """
        for i, token in enumerate(tokens, 1):
            self._scout.push(_tokens([token]))
            if self._scout.finished:
                return tokens[:i]
        return tokens

    def finish(self, reason: FinishReason, completed_s: int) -> list[bytes]:
        """The last events of a stream, or the whole body. `completed_s` is unix time."""
        events: list[_Event] = [] if self._is_ready else self._ready()
        if not self._processor.finished:
            events += self._processor.push(library.InferenceChunk.finish(REASONS[reason]))
        events += self._processor.finish()
        items = self._take(events)
        if self._body is not None:
            items = [self._body.to_json().encode()]
        if self._protocol is Protocol.RESPONSES:
            items[-1] = self._stamped(items[-1], completed_s)
        return items

    def fail(self, failure: Failure) -> bytes:
        """The one item that ends a request that failed: a body if nothing was given out before, else an event."""
        if self.has_started:
            return error_event(self._protocol, failure, self._request_id, self._num_events)
        return error_body(self._protocol, failure, self._request_id)

    def _ready(self) -> list[_Event]:
        """What comes before the first token. Here the library is told the usage of the prompt, for good."""
        self._is_ready = True
        sizes = {"prompt_tokens": self._num_prompt_tokens, "prompt_cache_hit_tokens": self.num_cached}
        usage = library.PromptUsage(**sizes)
        return list(self._processor.push(library.InferenceChunk.ready(prompt_usage=usage)))

    def _stamped(self, item: bytes, completed_s: int | None = None) -> bytes:
        """A response object with our times: they are its first fields of these names."""
        times = [self._created_s] if completed_s is None else [self._created_s, completed_s]
        left = iter(times)
        return _TIMES.sub(lambda match: b'"%b":%d' % (match[1], next(left)), item, count=len(times))

    def _take(self, events: list[_Event]) -> list[bytes]:
        if self._body is not None:
            for event in events:
                self._body.accumulate(event)
            return []
        items = [event.to_json().encode() for event in events]
        if self._num_events == 0 and items:
            if self._protocol is Protocol.RESPONSES:
                items[:2] = [self._stamped(item) for item in items[:2]]  # response.created and .in_progress
            # One time for the whole stream: when the library's is ours already, there is nothing to do.
            self._is_restamped = self._protocol is Protocol.CHAT_COMPLETIONS and not items[0].startswith(self._head)
        self._num_events += len(items)
        if self._is_restamped:
            head, length = self._head, self._head_bytes
            return [head + item[length:] for item in items]
        return items
