"""Workloads made up where there is no public trace: agents that call tools, and chat with one very long prompt amid it.

Agents follow the table of DualPath (spec serving.md §8): turns of a session by the length of its context, tokens that
a turn adds to the prompt, tokens that it generates. Turns times what each adds is about the context, so what is added
has the answer before in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import exp
from random import Random

from actors.rules.cost import PUBLISHED, Work
from run.simulate.arrival import Arrival, num_blocks

TPOT_S = 8e-3
"""Of the real model on eight H100: 7.6 to 7.9 ms a step from 1 K to 260 K (spec serving.md §3, K4)."""

MILLION = 1_000_000
CHAT_MEDIAN, CHAT_SIGMA, CHAT_MAX, CHAT_OUTPUT, CHAT_MAX_OUTPUT = 1020, 0.5, 16_384, 211, 1000
"""Tokens of prompts, log-normal, and of answers, exponential: as of Azure's conversation trace (spec serving.md §8)."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Of agents: the longest context, turns of a session, tokens that a turn adds and generates (the latter two, and
    `tool_s`, how long a tool runs, are means)."""

    max_context: int
    num_turns: int
    num_added: int
    num_generated: int
    tool_s: float = 1.0

    def turn_ns(self) -> float:
        """What a turn costs prefill, alone and with all before it cached, at half the context."""
        return PUBLISHED.ns(Work(self.num_added, self.max_context // 2, 128).terms())

    def turn_s(self) -> float:
        """From one turn to the next."""
        return self.turn_ns() / 1e9 + self.num_generated * TPOT_S + self.tool_s


AGENTS_32K = Habits(32_768, 60, 608, 148)
AGENTS_48K = Habits(49_152, 106, 474, 172)
AGENTS_64K = Habits(65_536, 157, 429, 176)


def agents(num: int, load_ns: float, seed: int = 0, habits: Habits = AGENTS_64K) -> list[Arrival]:
    """The first `num` requests of sessions that begin as a Poisson process and give prefill `load_ns` nanoseconds of
    work a second (0.8e9 for each replica), in order of arrival.

    A turn's prompt is the whole conversation: the prompt before, its answer, what the tool said. A session ends after
    its turns, or when the next one would not fit the context. A turn comes when an idle system would have answered the
    one before and the tool has run: a slow system is not spared, and every policy gets the same requests.

    So that the load is there from the start, as many sessions begin at once as run at a time in the long run, each with
    a part of the turns.
    """
    random = Random(f"agents {seed}")
    sessions_per_s = load_ns / habits.turn_ns() / habits.num_turns
    pending: list[tuple[float, int, Arrival]] = []
    numbers, sessions = count(), count()

    def begin(at_s: float, num_turns: int) -> None:
        for arrival in _session(random, habits, at_s, num_turns, next(sessions)):
            heappush(pending, (arrival.at_s, next(numbers), arrival))

    for _ in range(round(sessions_per_s * habits.num_turns * habits.turn_s())):
        begin(random.uniform(0, habits.turn_s()), 1 + int(random.random() * habits.num_turns))
    arrivals: list[Arrival] = []
    next_s = random.expovariate(sessions_per_s)
    while len(arrivals) < num:
        if pending and pending[0][0] <= next_s:
            arrivals.append(heappop(pending)[2])
        else:
            begin(next_s, habits.num_turns)
            next_s += random.expovariate(sessions_per_s)
    return arrivals


def _session(random: Random, habits: Habits, at_s: float, num_turns: int, number: int) -> list[Arrival]:
    """All turns of one session. Its conversation is one text: a block that one prompt does not fill has the same id in
    the next one, where it is longer."""
    first = number * num_blocks(habits.max_context)
    blocks = tuple(range(first, first + num_blocks(habits.max_context)))
    turns: list[Arrival] = []
    num_tokens = 0
    for _ in range(num_turns):
        num_tokens += _draw(random, habits.num_added - habits.num_generated)
        num_output = _draw(random, habits.num_generated)
        if num_tokens + num_output > habits.max_context:
            break
        num, num_more = num_blocks(num_tokens), num_blocks(num_tokens + num_output)
        turns.append(Arrival(at_s, num_tokens, num_output, blocks[:num], "agents", blocks[num:num_more]))
        at_s += habits.turn_ns() / 1e9 + num_output * TPOT_S + random.expovariate(1 / habits.tool_s)
        num_tokens += num_output
    return turns


def chat(num: int, load_ns: float, seed: int = 0) -> list[Arrival]:
    """Short prompts that have nothing in common, as a Poisson process that gives prefill `load_ns` nanoseconds of work
    a second."""
    random = Random(f"chat {seed}")
    chats_per_s = load_ns / PUBLISHED.ns(Work(round(CHAT_MEDIAN * exp(CHAT_SIGMA**2 / 2))).terms())
    arrivals: list[Arrival] = []
    at_s, used = 0.0, 0
    for _ in range(num):
        num_tokens = max(1, min(CHAT_MAX, round(CHAT_MEDIAN * random.lognormvariate(0, CHAT_SIGMA))))
        blocks = tuple(range(used, used + num_blocks(num_tokens)))
        used += len(blocks)
        num_output = min(CHAT_MAX_OUTPUT, _draw(random, CHAT_OUTPUT))
        arrivals.append(Arrival(at_s, num_tokens, num_output, blocks, "chat"))
        at_s += random.expovariate(chats_per_s)
    return arrivals


def chat_and_million(num: int, load_ns: float, seed: int = 0) -> list[Arrival]:
    """`num` chats, the same ones as without it, and amid them, a tenth of the time in, a prompt of a million tokens by
    another tenant."""
    chats = chat(num, load_ns, seed)
    at = num // 10
    blocks = tuple(range(1 << 32, (1 << 32) + num_blocks(MILLION)))
    million = Arrival(chats[at].at_s, MILLION, CHAT_OUTPUT, blocks, "million")
    return [*chats[:at], million, *chats[at:]]


WORKLOADS: Mapping[str, Callable[[int, float, int], list[Arrival]]] = {
    "agents-32k": partial(agents, habits=AGENTS_32K),
    "agents-48k": partial(agents, habits=AGENTS_48K),
    "agents-64k": partial(agents, habits=AGENTS_64K),
    "chat": chat,
    "chat-and-million": chat_and_million,
}
"""By name: of so many requests, so many nanoseconds of work a second, and a seed."""


def _draw(random: Random, mean: int) -> int:
    """A number of tokens, at least one, exponential."""
    return 1 + int(random.expovariate(1 / max(mean - 0.5, 1)))
