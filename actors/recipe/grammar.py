"""What the output of a request has to be, from what it asks for to the text of a grammar that is known to work.

    [thinking </think>] (answer | calls)

Thinking is any text. The answer is any text, or what the response format says; calls are those of the tools offered.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from llguidance import regex_to_lark

from actors.recipe.calls import TEXT, Tool, ToolRules, loose, section
from actors.recipe.fields import Refusal
from actors.recipe.schema import Unenforceable, plain, text_of
from actors.recipe.trial import MARKS, SPELLINGS, Marks, try_out
from actors.rules.grammars import MAX_BYTES, head
from schemas.failure import Code

KEPT = 128
KEPT_BYTES = 256 * 1024
"""So many grammars are kept, those that were lately asked for, unless what asks for them is longer."""

_LOCATION = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")

_PATTERN = re.compile(r"regex parse error: error: (.*)", re.DOTALL)
_BEYOND = ("not supported", "exceed", "decimal literal invalid")
"""In what is said of a pattern that is one, but not for us: lookaround, or too large."""

_UNDECIDED = "Unable to determine"
_WRONG = ("Unsatisfiable", "Invalid", "Expected", "properties must", "schema must")
"""How llguidance begins to say that something is no schema, or that nothing satisfies it."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for. `json` is a schema as text (`is_strict`: see `plain`), `regex` a pattern: of the answer,
    "" for any.

    `is_in_calls`: the prompt ends within a calls section. `is_single`: one call at most. `format_field`, `tools_field`:
    the client's names for the response format and for the schema of a tool.
    """

    thinks: bool = False
    json: str = ""
    is_strict: bool = False
    regex: str = ""
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_in_calls: bool = False
    is_single: bool = False
    format_field: str = "response_format"
    tools_field: str = "tools"

    @property
    def num_bytes(self) -> int:
        return len(self.json) + len(self.regex) + sum(len(tool.schema) for tool in self.tools)

    @property
    def is_anything(self) -> bool:
        """No grammar is needed."""
        return not self.json and not self.regex and not self.tools


@dataclass(frozen=True)
class Grammar:
    """A text for decode replicas ("": anything goes), and the fields of the request that it leaves out."""

    text: str
    ignored: tuple[str, ...] = ()


def write(asked: Asked, marks: Marks) -> str:
    """The text of a grammar, with these ids for the control tokens. Raises Unenforceable."""
    lines, answers = [], []
    if asked.json:
        schema = plain(json.loads(asked.json), is_strict=asked.is_strict)
        if schema is False:
            raise Unenforceable("nothing satisfies it", is_wrong=True)
        answers.append("format")
        lines.append(f"format: {text_of(schema)}")
    elif asked.regex:
        answers.append("format")
        lines.append("format: FORMAT")
        lines.append(f"FORMAT: /{_regex(asked.regex)}/ & ~/\\n(?s:.*)/")  # the library cuts them off there
    elif not asked.must_call and not asked.is_in_calls:
        answers.append("text")
        lines.append(f"text: {TEXT}")
    if asked.tools:
        opened = '"\\n\\n<" d " calls>\\n<" section'
        if asked.is_in_calls:
            answers = ['"<" section']
        elif asked.must_call:
            answers = [opened]
        else:
            answers.append(opened if "format" in answers else '/(?s:.*)</ d " calls>\\n<" section')
        shared: dict[str, str] = {}
        names = [f"t{place}" for place in range(len(asked.tools))]
        lines += [f"d: <[{marks.dsml}]>", section(names, is_single=asked.is_single)]
        lines += [ToolRules(tool, name, shared).text for tool, name in zip(asked.tools, names, strict=True)]
        lines += [f"{name}: {schema}" for schema, name in shared.items()]
    thinking = f"{TEXT} <[{marks.think_end}]> " if asked.thinks else ""
    unspelt = list(marks) if asked.tools else [marks.think_end]
    text = head(unspelt) + f"start: {thinking}answer\nanswer: {' | '.join(answers)}\n" + "\n".join(lines)
    for spelling in SPELLINGS[: len(unspelt)]:
        if spelling in text:
            raise Unenforceable(f"{spelling!r} cannot be part of an answer")
    if len(text.encode()) > MAX_BYTES:
        raise Unenforceable(f"its grammar would have {len(text.encode())} bytes, of {MAX_BYTES} at most")
    return text


class Grammars:
    """Those of the requests of one model. What has been tried is kept; all else takes milliseconds, at worst seconds.

    To be asked from threads, too: two that ask for the same at once both try it.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._found: OrderedDict[Asked, Grammar | Refusal] = OrderedDict()

    def is_known(self, asked: Asked) -> bool:
        """Whether `find` takes no time."""
        return asked.is_anything or asked in self._found

    def find(self, asked: Asked) -> Grammar:
        """The grammar of what is asked for, tried. Raises Refusal naming the field that cannot be had."""
        if asked.is_anything:
            return Grammar("")
        found = self._found.pop(asked, None)
        if found is None:
            try:
                found = self._try(asked)
            except Refusal as refusal:
                if refusal.failure.code is Code.OVERLOADED:
                    raise
                found = refusal
        if asked.num_bytes <= KEPT_BYTES:
            self._found[asked] = found  # the latest
        while len(self._found) > KEPT:
            self._found.popitem(last=False)
        if isinstance(found, Refusal):
            raise Refusal(found.failure.code, found.failure.message, found.failure.field)
        return found

    def _try(self, asked: Asked) -> Grammar:
        if not self._why_not(asked):
            return Grammar(write(asked, self._marks))
        if asked.json or asked.regex:
            alone = replace(asked, tools=(), must_call=False, is_in_calls=False)
            if wrong := self._why_not(alone):
                raise _refusal(wrong, asked.format_field)
        tools = list(asked.tools)
        for place, tool in enumerate(tools):
            if wrong := self._why_not(replace(asked, json="", regex="", tools=(tool,))):
                self._loosen(asked, tools, place, wrong)
        told = replace(asked, tools=tuple(tools))
        while wrong := self._why_not(told):
            place = max(range(len(tools)), key=lambda place: len(tools[place].schema), default=0)
            if not tools or tools[place] == loose(tools[place]):
                raise _refusal(wrong, "tools" if tools else asked.format_field)
            self._loosen(asked, tools, place, wrong)
            told = replace(asked, tools=tuple(tools))
        return Grammar(write(told, self._marks), (asked.tools_field,))

    def _loosen(self, asked: Asked, tools: list[Tool], place: int, wrong: Unenforceable) -> None:
        """Do without the schema of one of the tools; raises Refusal if the client insists on it."""
        if tools[place].is_strict or asked.must_call:
            path = asked.tools_field.replace("[]", f"[{place}]", 1)
            raise _refusal(wrong, path, f"{path}, of {tools[place].name[:64]!r}")
        tools[place] = loose(tools[place])

    def _why_not(self, asked: Asked) -> Unenforceable | None:
        """Tried without the thinking, and within the calls, where something can go wrong."""
        try:
            if asked.tools and not (asked.json or asked.regex):
                asked = replace(asked, is_in_calls=True)
            wrong = try_out(write(replace(asked, thinks=False), MARKS))
        except Unenforceable as error:
            return error
        except RecursionError:
            return Unenforceable("it is nested too deep")
        return _told(wrong) if wrong else None


def _told(wrong: str) -> Unenforceable:
    """What llguidance says, in our words where its own are of its insides."""
    wrong = _LOCATION.sub("", wrong)
    if wrong.startswith(_UNDECIDED):
        return Unenforceable("Too complex: it cannot be told what its patterns have in common")
    if pattern := _PATTERN.search(wrong):
        detail = pattern[1][:200]
        return Unenforceable(f"a pattern: {detail}", is_wrong=not any(word in detail for word in _BEYOND))
    return Unenforceable(wrong[:300], is_wrong=wrong.startswith(_WRONG))


def _refusal(wrong: Unenforceable, field: str, where: str = "") -> Refusal:
    code = Code.BAD_REQUEST if wrong.is_wrong else Code.UNSUPPORTED
    return Refusal(code, f"{where or field}: cannot be enforced: {wrong}", field)


def _regex(pattern: str) -> str:
    """Of a whole answer: as such its ends need not be named."""
    if not pattern.startswith("\\"):
        pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    return regex_to_lark(pattern, "dw")
