"""Some sixty questions about Shoal and the model itself, known by heart, and the modesty to know no others.

Each has wordings that are trained and wordings that only `held_out` asks: what is measured is whether an answer is
found by other words, as the answers themselves are the same. For terms the wordings are the same few frames, of which
each term lacks two. An eighth asks for what nobody told the model, and the answer says so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from run.train.example import Example
from run.train.words import CITIES, FOODS, NAMES, THINGS


@dataclass(frozen=True, slots=True)
class Question:
    """Wordings that are trained, wordings that are not, and the answer to all of them."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


_FRAMES = (
    *("What is {}?", "Tell me about {}.", "What is {} in Shoal?", "Explain {}.", "Do you know what {} is?"),
    *("Describe {}.", "Can you explain {}?", "Please tell me what {} is."),
)
_TERMS = {
    "Shoal": "Shoal is an open serving system for language models, made of small actors.",
    "shoal-tiny": "I am shoal-tiny, a small model that is trained and served by Shoal.",
    "the gateway": "The gateway is the HTTP door for clients.",
    "the recipe": "The recipe turns messages into tokens, and tokens into messages.",
    "the entrypoint": "The entrypoint owns a request, its tokens and its end.",
    "a balancer": "A balancer chooses the replica that gets a request.",
    "prefill": "Prefill computes the prompt.",
    "decode": "Decode makes the answer, token by token.",
    "vision": "Vision encodes images.",
    "the writer": "The writer stores blocks on disk.",
    "metadata": "Metadata knows where blocks are.",
    "the kvstore": "The kvstore keeps the cache within its budget.",
    "the quota actor": "The quota actor holds the limits of tenants.",
    "a supervisor": "A supervisor restarts what has ended.",
    "an actor": "An actor is a small program with a mailbox.",
    "a replica": "A replica is one of the actors that do the same work.",
    "a tenant": "A tenant is a client with its own keys and limits.",
    "a block": "A block is 128 tokens of the cache.",
    "a slab": "A slab is a file of blocks.",
    "the window": "The window is the last 128 tokens.",
    "a cache hit": "A cache hit reads from disk what was computed before.",
    "bounded replay": "Bounded replay computes the last layers for the last 128 tokens only.",
    "exact mode": "Exact mode reads no cache and skips no layer.",
    "a draft": "A draft is a guess of the next tokens, which the model checks.",
    "DSpark": "DSpark is the three stages that draft the next tokens.",
    "Engram": "Engram is a memory that is read by the last few tokens.",
    "NATS": "NATS is the bus that carries the messages.",
    "the hand-over": "The hand-over moves a request from prefill to decode.",
    "the simulator": "The simulator runs the actors in virtual time.",
}


def _term(place: int, term: str, answer: str) -> Question:
    kept_back = {place % len(_FRAMES), (place + 3) % len(_FRAMES)}
    asked: tuple[list[str], list[str]] = ([], [])
    for index, frame in enumerate(_FRAMES):
        asked[index in kept_back].append(frame.format(term))
    return Question(tuple(asked[0]), tuple(asked[1]), answer)


def _q(answer: str, *wordings: str) -> Question:
    """The last wording is held out."""
    return Question(wordings[:-1], wordings[-1:], answer)


_HOW_TO = {  # what to do: how it is asked, with the verb's object, and the answer
    "start Shoal": "Type make up to start Shoal.",
    "stop Shoal": "Press Ctrl-C to stop Shoal.",
    "run the tests": "Type make test to run the tests.",
    "chat with you": "Type shoal chat to chat with me.",
    "see the status": "Type shoal status to see who runs.",
    "train the model": "Type shoal train to train the model.",
    "measure the model": "Type shoal eval to measure the model.",
    "use my own model": "Set SHOAL_MODEL to the folder of your model.",
    "change the port": "Set SHOAL_HTTP_PORT to the port.",
    "set an API key": "Set SHOAL_API_KEYS to the keys.",
    "move the store": "Set SHOAL_STORE to another folder.",
    "ask without the cache": "Put exact: true into the request.",
}
_HOW_FRAMES = ("How do I {}?", "How can I {}?", "I want to {}.", "Tell me how to {}.", "What do I do to {}?")


def _how_to(place: int, verb: str, answer: str) -> Question:
    asked = [frame.format(verb) for frame in _HOW_FRAMES]
    held_out = asked.pop(place % len(asked))
    return Question(tuple(asked), (held_out,), answer)


QUESTIONS = (
    *(_term(place, term, answer) for place, (term, answer) in enumerate(_TERMS.items())),
    *(_how_to(place, verb, answer) for place, (verb, answer) in enumerate(_HOW_TO.items())),
    _q("Hello! What can I do for you?", "Hello", "Hi", "Good morning", "Good day", "Hi there", "Hello there"),
    _q(
        "I am fine, thanks. What can I do for you?",
        "How are you?",
        "How do you do?",
        "Are you well?",
        "How are you now?",
    ),
    _q("You are welcome.", "Thanks", "Thank you", "Many thanks", "Thank you very much", "Thanks a lot"),
    _q("Goodbye!", "Goodbye", "Bye", "See you", "Good night", "Bye for now"),
    _q(
        "I am shoal-tiny, a small model that is trained and served by Shoal.",
        *("Who are you?", "What are you?", "What is your name?", "Tell me your name.", "Tell me who you are."),
    ),
    _q(
        "I find facts in a text, repeat it, call tools, write JSON, do sums and look at pictures.",
        *(
            "What can you do?",
            "How can you help me?",
            "What do you do?",
            "Tell me what you can do.",
            "What can you help me with?",
        ),
    ),
    _q(
        "I know little of the world: I only know Shoal, and what you tell me.",
        *("What do you know?", "How much do you know?", "What can you not do?", "What do you know of the world?"),
    ),
    _q(
        "No, I am a small language model.",
        "Are you a human?",
        "Are you a person?",
        "Are you human?",
        "Are you a real person?",
    ),
    _q(
        "The Shoal project trained me.", "Who made you?", "Who trained you?", "Who built you?", "By whom were you made?"
    ),
    _q(
        "My context is 8192 tokens.",
        *(
            "How long is your context?",
            "What is your context?",
            "How many tokens can you read?",
            "How large is your context?",
        ),
    ),
    _q(
        "A block has 128 tokens.",
        *(
            "How large is a block?",
            "How many tokens has a block?",
            "What is the size of a block?",
            "How big is a block?",
        ),
    ),
    _q(
        "Five tokens are drafted in a step.",
        *(
            "How many tokens are drafted?",
            "How long is a draft?",
            "How many tokens has a draft?",
            "How large is a draft?",
        ),
    ),
    _q(
        "Shoal is under the Apache 2.0 licence.",
        *(
            "What is the licence of Shoal?",
            "Which licence has Shoal?",
            "Tell me the licence.",
            "What licence is Shoal under?",
        ),
    ),
    _q(
        "Shoal is written in Python.",
        *("In which language is Shoal written?", "What is Shoal written in?", "Is Shoal written in Python?"),
        "Which language is Shoal written in?",
    ),
    _q(
        "The gateway listens on port 8000.",
        *(
            "Which port is it?",
            "What is the port of the gateway?",
            "On which port is Shoal?",
            "Which port has the gateway?",
        ),
    ),
    _q(
        "Shoal speaks Chat Completions, Responses and Messages.",
        *(
            "Which protocols are there?",
            "What protocols does Shoal speak?",
            "Which protocols can I use?",
            "Which protocols does Shoal speak?",
        ),
    ),
    _q(
        "Shoal serves models of the DeepSeek V4.1 class.",
        *("Which models does Shoal serve?", "What models can Shoal serve?", "What does Shoal serve?"),
        "Which models can Shoal serve?",
    ),
    _q(
        "No, Shoal runs on a laptop too.",
        *("Do I need a GPU?", "Does Shoal need a GPU?", "Is a GPU needed?", "Do you need a GPU?"),
    ),
    _q(
        "The cache is on disk, in blocks of 128 tokens.",
        *("Where is the cache?", "Where are the blocks?", "Where is the cache stored?", "Where are blocks stored?"),
    ),
    _q(
        "Actors send typed messages over NATS.",
        *(
            "How do actors talk?",
            "How do the actors talk to each other?",
            "How do actors send messages?",
            "How does an actor talk?",
        ),
    ),
    _q(
        "Public subjects begin with shoal.api.",
        *("What are the public subjects?", "Which subjects are public?", "How do public subjects begin?"),
        "Tell me the public subjects.",
    ),
    _q(
        "You can send PNG, JPEG, GIF and WebP.",
        *(
            "Which images can I send?",
            "What images can you read?",
            "Which images do you know?",
            "What images can I send?",
        ),
    ),
)
_SYSTEMS = ("You are a helpful assistant.", "You are Shoal.", "Be short.", "Answer in one sentence.")
_UNKNOWN = (
    ("What is a {}?", "I do not know what a {} is.", THINGS),
    ("Do you know what {} is?", "I do not know what {} is.", FOODS),
    ("Who is {}?", "I do not know who {} is.", NAMES),
    ("Where is {}?", "I do not know where {} is.", CITIES + NAMES),
    ("Tell me about {}.", "I do not know {}.", CITIES + NAMES),
)


def example(rng: random.Random, num_tokens: int) -> Example:
    """A question in one of the trained wordings, at times spelt as people type; of a fixed size."""
    asked, answer = _trained(rng)
    if rng.random() < 0.15:
        asked = asked.rstrip("?.")
    if rng.random() < 0.1:
        asked = asked[0].lower() + asked[1:]
    return _conversation(rng, asked, answer)


def held_out(rng: random.Random, num_tokens: int) -> Example:
    """A question in one of the wordings that `example` never uses."""
    question = rng.choice(QUESTIONS)
    return _conversation(rng, rng.choice(question.held_out), question.answer)


def _trained(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.125:
        ask, answer, words = rng.choice(_UNKNOWN)
        word = rng.choice(words)
        return ask.format(word), answer.format(word)
    question = rng.choice(QUESTIONS)
    return rng.choice(question.trained), question.answer


def _conversation(rng: random.Random, asked: str, answer: str) -> Example:
    """Half of them stand alone; the others have a system prompt, an earlier turn or a thought before them."""
    messages = [{"role": "user", "content": asked}]
    said = {"role": "assistant", "content": answer}
    setting = rng.choice(("alone", "alone", "alone", "system", "turn", "thought"))
    if setting == "system":
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEMS)})
    elif setting == "turn":
        before, answered = _trained(rng)
        messages[:0] = [{"role": "user", "content": before}, {"role": "assistant", "content": answered}]
    elif setting == "thought":
        said["reasoning_content"] = "I answer in one sentence."
    request: dict[str, Any] = {"messages": messages}
    request |= {"thinking": {"type": "enabled" if setting == "thought" else "disabled"}}
    return Example("about", request, said)
