"""The table of public request fields: each one is honoured, listed as ignored, or refused by name.

README.md prints it, and a test holds the two together. A field that is not here is refused as unknown: what is not
understood is never silently dropped. `null` is everywhere as good as absent.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from schemas.api import Protocol
from schemas.failure import Code, Failure


class Use(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class Field(NamedTuple):
    """One request field. A refused field is let through when its value is one of `neutral`: it then asks nothing."""

    use: Use
    neutral: tuple[Any, ...] = ()
    note: str = ""


class Refusal(Exception):
    """A request that is not served, and why."""

    def __init__(self, code: Code, message: str, field: str = "") -> None:
        super().__init__(message)
        self.failure = Failure(code=code, message=message, field=field)


def _honoured(note: str = "") -> Field:
    return Field(Use.HONOURED, note=note)


def _ignored(note: str = "") -> Field:
    return Field(Use.IGNORED, note=note)


def _refused(*neutral: Any, note: str = "") -> Field:
    return Field(Use.REFUSED, neutral, note)


_TEMPERATURE = "0 is greedy; an explicit value also holds while thinking"
_TOP_P = "an explicit value also holds outside thinking"
_SEED = "drawn at random when absent"
_MIN_TOKENS = "an extension; before, the model does not end by itself; a stop string still ends the answer"
_IGNORE_EOS = "an extension, for benchmarks; `true`: `min_tokens` is as many as there may be at most"
_LOGPROBS = "of the model's own choice, before temperature, top-p and what else narrows it"
_TOP_LOGPROBS = "0 to 20: how many of the likeliest tokens are named beside each"
_NO_PENALTY = "use temperature and top_p"
_TOP_K = "only of so many of the likeliest tokens; 0 and -1 are all"
_MIN_P = "an extension; only tokens at least so many times as likely as the likeliest"
_EXACT = "an extension; `true`: no cached block is read, and no layer is skipped for any token of the prompt"
_STRICT = "the arguments satisfy the schema, or the request is refused; else a schema may be ignored"
_CHOICE = "of tools that are given; while the model thinks it calls once it has thought"
_FORMAT = "`json_schema`: it satisfies the schema, or the request is refused"
_OBFUSCATION = "there is none"
_SUMMARY = "the reasoning itself is shown"
_DETAIL = "every image gets the size that the model wants"

_CHAT: dict[str, Field] = {
    "model": _honoured("the served name or an alias"),
    "messages": _honoured("roles system, developer (as system), user, assistant, tool, latest_reminder; text, images"),
    "stream": _honoured(),
    "stream_options": _honoured("`include_usage`; usage is on the last chunk with a choice in any case"),
    "max_tokens": _honoured(),
    "max_completion_tokens": _honoured("the same as max_tokens; both may be given if they are equal"),
    "temperature": _honoured(_TEMPERATURE),
    "top_p": _honoured(_TOP_P),
    "top_k": _honoured("an extension; " + _TOP_K),
    "min_p": _honoured(_MIN_P),
    "seed": _honoured(_SEED),
    "min_tokens": _honoured(_MIN_TOKENS),
    "ignore_eos": _honoured(_IGNORE_EOS),
    "exact": _honoured(_EXACT),
    "stop": _honoured("in the answer, not in the reasoning"),
    "logprobs": _honoured(_LOGPROBS + "; those of the reasoning are in `reasoning_content` beside `content`"),
    "top_logprobs": _honoured(_TOP_LOGPROBS + "; with `logprobs`"),
    "logit_bias": _honoured("by the ids of the checkpoint's `tokenizer.json`, added before temperature"),
    "tools": _honoured("functions; calls are parsed from the output as the model writes them"),
    "tool_choice": _honoured(_CHOICE + "; `allowed_tools` is refused: give only those"),
    "parallel_tool_calls": _honoured("`false`: one call at most"),
    "thinking": _honoured("`type`: enabled, disabled, adaptive (as enabled)"),
    "reasoning_effort": _honoured("`none` turns thinking off"),
    "response_format": _honoured("`text`, `json_object`, `regex` (an extension), " + _FORMAT),
    "response_format.json_schema.description": _ignored("the schema is what the model is told"),
    "stream_options.include_obfuscation": _ignored(_OBFUSCATION),
    "thinking.budget_tokens": _ignored(),
    "tools[].function.strict": _honoured(_STRICT),
    "messages[].name": _ignored(),
    "messages[].refusal": _ignored(),
    "messages[].annotations": _ignored(),
    "tool_calls[].index": _ignored(),
    "content[].image_url.detail": _ignored(_DETAIL),
    "content[].cache_control": _ignored("prefixes are found by their tokens"),
    "content[].prompt_cache_breakpoint": _ignored(),
    "metadata": _ignored(),
    "prompt_cache_key": _ignored("prefixes are found by their tokens"),
    "prompt_cache_options": _ignored(),
    "prompt_cache_retention": _ignored(),
    "safety_identifier": _ignored(),
    "service_tier": _ignored(),
    "store": _ignored("nothing is stored"),
    "user": _ignored(),
    "messages[].audio": _refused(),
    "messages[].function_call": _refused(note="use tool_calls"),
    "audio": _refused(),
    "frequency_penalty": _refused(0, note=_NO_PENALTY),
    "function_call": _refused("auto", "none", note="use tool_choice"),
    "functions": _refused([], note="use tools"),
    "modalities": _refused(["text"]),
    "moderation": _refused(),
    "n": _refused(1, note="send it n times, with a seed each: their common prompt is computed once"),
    "prediction": _refused(),
    "presence_penalty": _refused(0, note=_NO_PENALTY),
    "repetition_penalty": _refused(1, note=_NO_PENALTY),
    "verbosity": _refused("medium"),
    "web_search_options": _refused(),
}

_RESPONSES: dict[str, Field] = {
    "model": _honoured("the served name or an alias"),
    "input": _honoured("text, or messages, reasoning (its `content`), calls, their outputs; text and images in them"),
    "instructions": _honoured(),
    "stream": _honoured(),
    "stream_options": _honoured(),
    "max_output_tokens": _honoured(),
    "temperature": _honoured(_TEMPERATURE),
    "top_p": _honoured(_TOP_P),
    "top_k": _honoured("an extension; " + _TOP_K),
    "min_p": _honoured(_MIN_P),
    "seed": _honoured("an extension; " + _SEED),
    "min_tokens": _honoured(_MIN_TOKENS),
    "ignore_eos": _honoured(_IGNORE_EOS),
    "exact": _honoured(_EXACT),
    "top_logprobs": _honoured(_TOP_LOGPROBS + "; more than 0 asks for logprobs"),
    "include": _honoured("`message.output_text.logprobs`: " + _LOGPROBS + "; all else is ignored"),
    "tools": _honoured("functions, namespaces and custom `apply_patch`; others are refused"),
    "tool_choice": _honoured(_CHOICE + "; `allowed_tools` is refused: give only those"),
    "parallel_tool_calls": _honoured("`false`: one call at most"),
    "reasoning": _honoured("`effort`"),
    "text": _honoured("`format`: `text`, `json_object`, " + _FORMAT),
    "reasoning.context": _ignored(),
    "reasoning.generate_summary": _ignored(_SUMMARY),
    "reasoning.mode": _ignored(),
    "reasoning.summary": _ignored(_SUMMARY),
    "stream_options.include_obfuscation": _ignored(_OBFUSCATION),
    "text.format.description": _ignored("the schema is what the model is told"),
    "tools[].strict": _honoured(_STRICT),
    "input[].summary": _ignored("of reasoning items"),
    "input[].encrypted_content": _ignored("of reasoning items"),
    "content[].detail": _ignored(_DETAIL),
    "content[].annotations": _ignored(),
    "content[].logprobs": _ignored(),
    "content[].prompt_cache_breakpoint": _ignored(),
    "access_programs": _ignored(),
    "metadata": _ignored(),
    "prompt_cache_key": _ignored("prefixes are found by their tokens"),
    "prompt_cache_options": _ignored(),
    "prompt_cache_retention": _ignored(),
    "safety_identifier": _ignored(),
    "service_tier": _ignored(),
    "store": _ignored("nothing is stored"),
    "user": _ignored(),
    "content[].file_id": _refused(note="files are not kept here: send the image as a data URL"),
    "background": _refused(False),
    "background_options": _refused(),
    "context_management": _refused([]),
    "conversation": _refused(),
    "image": _refused(),
    "max_tool_calls": _refused(),
    "moderation": _refused(),
    "previous_response_id": _refused(note="nothing is stored: send the whole input"),
    "prompt": _refused(),
    "text.verbosity": _refused("medium"),
    "truncation": _refused("disabled"),
}

_MESSAGES: dict[str, Field] = {
    "model": _honoured("the served name or an alias"),
    "messages": _honoured("text, image, thinking, tool_use, tool_result; an assistant turn at the end is no prefill"),
    "system": _honoured(),
    "stream": _honoured(),
    "max_tokens": _honoured("may be absent"),
    "temperature": _honoured(_TEMPERATURE),
    "top_p": _honoured(_TOP_P),
    "top_k": _honoured(_TOP_K),
    "min_p": _honoured(_MIN_P),
    "seed": _honoured("an extension; " + _SEED),
    "min_tokens": _honoured(_MIN_TOKENS),
    "ignore_eos": _honoured(_IGNORE_EOS),
    "exact": _honoured(_EXACT),
    "stop_sequences": _honoured("in the answer, not in the reasoning"),
    "thinking": _honoured("`type`: enabled, disabled, adaptive (as enabled)"),
    "tools": _honoured("client tools; server tools are refused"),
    "tool_choice": _honoured(_CHOICE + "; `disable_parallel_tool_use`: one call at most"),
    "output_config": _honoured("`effort`; `format`, " + _FORMAT),
    "output_config.task_budget": _ignored(),
    "thinking.block_binding": _ignored(),
    "thinking.budget_tokens": _ignored(),
    "thinking.display": _ignored("what the model thinks is always shown"),
    "tools[].strict": _honoured(_STRICT),
    "content[].cache_control": _ignored("prefixes are found by their tokens"),
    "content[].caller": _ignored(),
    "content[].citations": _ignored(),
    "content[].is_error": _ignored("the result itself says so"),
    "content[].toolset_name": _ignored(),
    "betas": _ignored(),
    "billing_policy": _ignored(),
    "cache_control": _ignored("prefixes are found by their tokens"),
    "diagnostics": _ignored(),
    "inference_geo": _ignored(),
    "metadata": _ignored(),
    "service_tier": _ignored(),
    "speed": _ignored(),
    "user_profile_id": _ignored(),
    "workspace_id": _ignored(),
    "compaction": _refused(),
    "container": _refused(),
    "context_management": _refused({}),
    "fallback_credit_token": _refused(),
    "fallbacks": _refused([]),
    "mcp_servers": _refused([]),
    "output_format": _refused(),
    "thread": _refused(),
}

FIELDS: dict[Protocol, dict[str, Field]] = {
    Protocol.CHAT_COMPLETIONS: _CHAT,
    Protocol.RESPONSES: _RESPONSES,
    Protocol.MESSAGES: _MESSAGES,
    Protocol.COUNT_TOKENS: _MESSAGES,
}


def check(protocol: Protocol, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The honoured top-level fields of a request, and the names of the ignored ones that were set, those inside another
    one included.

    Raises Refusal naming the first field that is refused or unknown.
    """
    table = FIELDS[protocol]
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        field = table.get(name)
        if field is None or "." in name:
            raise Refusal(Code.BAD_REQUEST, f"unknown field {name[:64]!r}", name[:64])
        if value is None:
            continue
        if field.use is Use.HONOURED:
            kept[name] = value
        elif field.use is Use.IGNORED:
            ignored.append(name)
        else:
            refuse_unless_neutral(protocol, name, value)
    for name, field in table.items():
        if "." not in name:
            continue
        inner: Any = kept
        for part in name.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        if inner is not None and field.use is Use.IGNORED:
            ignored.append(name)
        elif inner is not None and field.use is Use.REFUSED:
            refuse_unless_neutral(protocol, name, inner)
    return kept, ignored


def refuse_unless_neutral(protocol: Protocol, name: str, value: Any, path: str = "") -> None:
    """Raise Refusal if a refused field (of any depth, by its name in the table) is set to ask for something. `path` is
    where it was found, if that says more.
    """
    field = FIELDS[protocol][name]
    if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in field.neutral):
        return
    hint = f": {field.note}" if field.note else ""
    allowed = f" (allowed: {', '.join(map(repr, field.neutral))})" if field.neutral else ""
    where = path or name
    raise Refusal(Code.UNSUPPORTED, f"{where} is not supported{allowed}{hint}", where)
