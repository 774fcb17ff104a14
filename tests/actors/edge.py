"""Gateway and recipe on a memory bus, above an entrypoint that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.gateway.actor import Gateway
from actors.gateway.keys import Keys
from actors.quota.actor import Quota
from actors.recipe.actor import Recipe
from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter
from actors.recipe.fetch import FETCH, Fetch
from actors.rules.tenants import Tenants
from bus.actor import Actor, Envelope, Handler
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, BusError, Delivery
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import CANCEL, INBOX_PREFIX, RECIPE_TOKENS, RESEND, SUBMIT, Subject, api, tenant_inbox
from run.tokenizer import train
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.message import Role
from schemas.request import (
    Cancel,
    CancelAcknowledged,
    Cancelled,
    End,
    Failed,
    Finished,
    FinishReason,
    LastWord,
    Resend,
    Submit,
    Submitted,
    TokensEmitted,
)

CHAT = Protocol.CHAT_COMPLETIONS
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = {**BODY, "stream": True}
STOP = Finished(reason=FinishReason.STOP)
CONTEXT_TOKENS = 2048
TIMEOUT_S = 10.0


IMAGE_TOKEN = 1015
"""Of the tokenizer below."""


def make_card(folder: Path, *, image_token: int | None = None, **ours: Any) -> ModelCard:
    """A checkpoint folder without weights, and its card; with an image token it has a vision tower."""
    folder.mkdir(parents=True, exist_ok=True)
    train(1024).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"text_config": {"max_position_embeddings": CONTEXT_TOKENS}, "eos_token_id": 1}
    if image_token is not None:
        config["image_token_id"] = image_token
        index = {"weight_map": {"vision.norm.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    ours = {"model": "shoal-tiny", "aliases": ["tiny"], "thinking_default": False} | ours
    (folder / "shoal.json").write_text(json.dumps(ours))
    return ModelCard.from_folder(folder)


class FakeEntrypoint(Actor):
    """Takes requests; emits `answer` for each at once, unless `is_silent`. Tests can drive it by hand."""

    role = Role.ENTRYPOINT

    def __init__(self, id: str, bus: Bus, answer: list[int]) -> None:
        super().__init__(id, bus)
        self.answer = answer
        self.is_silent = False
        self.refusal: Failure | None = None
        self.submitted: dict[str, Submit] = {}
        self.cancelled: dict[str, Cancel] = {}
        self.resends: list[Resend] = []
        self.held: dict[str, tuple[list[int], End | None]] = {}
        self.news = asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {SUBMIT: self._on_submit, CANCEL: self._on_cancel, RESEND: self._on_resend}

    async def _on_submit(self, submit: Submit, envelope: Envelope) -> Submitted:
        if self.refusal is not None:
            raise BusError(self.refusal)
        if self.submitted.get(submit.request_id) == submit:
            return Submitted(shard=self.id)
        self.submitted[submit.request_id] = submit
        self.held[submit.request_id] = (output_of(submit), None)
        if not self.is_silent:
            self.spawn(self._generate(submit))
        self.news.set()
        return Submitted(shard=self.id)

    async def _generate(self, submit: Submit) -> None:
        if 0 < submit.limits.deadline_ns <= self.bus.seams.clock_ns():
            late = Failure(code=Code.DEADLINE_EXCEEDED, message="too late", field="deadline")
            await self.emit(submit.request_id, [], Failed(failure=late))
        for token in self.answer[submit.num_output : submit.limits.max_tokens]:
            await self.emit(submit.request_id, [token])
        is_cut = len(self.answer) > submit.limits.max_tokens
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        await self.emit(submit.request_id, [], Finished(reason=reason))

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        known = self.held.get(cancel.request_id)
        was_running = known is not None and known[1] is None
        if was_running:
            self.cancelled[cancel.request_id] = cancel
            await self.emit(cancel.request_id, [], Cancelled())
        self.news.set()
        return CancelAcknowledged(request_id=cancel.request_id, was_running=was_running)

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        self.resends.append(resend)
        counts, tokens = [], []
        ends: list[tuple[int, LastWord]] = []
        for i, (id, first) in enumerate(zip(resend.request_ids, resend.first_indexes, strict=True)):
            lost = Failed(failure=Failure(code=Code.WORKER_LOST, message="not known here"))
            have, end = self.held.get(id, ([], lost))
            counts.append(len(have[first:]))
            tokens.extend(have[first:])
            if end is not None:
                ends.append((i, end))
        return TokensEmitted(
            source=f"entrypoint/{self.id}",
            request_ids=resend.request_ids,
            epochs=resend.epochs,
            first_indexes=resend.first_indexes,
            counts=counts,
            tokens=tokens,
            ends=ends,
        )

    async def emit(self, request_id: str, tokens: list[int], end: End | None = None, *, is_lost: bool = False) -> None:
        """The next tokens of a request, and maybe its end. `is_lost`: the message never arrives."""
        have, known_end = self.held[request_id]
        first = len(have)
        if known_end is not None:
            return
        have.extend(tokens)
        self.held[request_id] = (have, end)
        emitted = TokensEmitted(
            source=f"entrypoint/{self.id}",
            request_ids=[request_id],
            epochs=[1],
            first_indexes=[first],
            counts=[len(tokens)],
            tokens=tokens,
            ends=[(0, end)] if end is not None else [],
        )
        if not is_lost:
            await self.bus.tell(RECIPE_TOKENS.at(self.submitted[request_id].recipe), emitted)

    async def until(self, condition: Any) -> None:
        """Wait until something asked of it has made this true."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


def output_of(submit: Submit) -> list[int]:
    """What it says was told of it already."""
    return memoryview(submit.prompt.inline).cast("I").tolist()[submit.num_prompt_tokens :]


@dataclass
class Edge:
    """The system under test."""

    broker: MemoryBroker
    hub: MemoryHub
    card: ModelCard
    entrypoint: FakeEntrypoint
    recipe: Recipe
    gateway: Gateway
    quota: Quota
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    wires: dict[str, MemoryWire] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def client(self, tenant: str = "") -> Inbox:
        """A NATS client of its own; with a tenant, that one's user."""
        return await Inbox.open(self.broker, tenant)

    async def start(self, name: str, actor: Actor) -> None:
        """Run an actor under this name until the end. Raises what ended it, if that came before it was ready."""
        assert isinstance(actor.bus.wire, MemoryWire)
        self.wires[name] = actor.bus.wire
        ready = asyncio.Event()
        self.tasks[name] = asyncio.create_task(actor.run(ready.set), name=name)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self.tasks[name], waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.tasks[name].done():
            self.tasks[name].result()

    async def kill(self, name: str) -> None:
        """End an actor without a word."""
        self.wires[name].cut()
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])


class Inbox:
    """A NATS client: publishes with its inbox as reply, and reads what comes."""

    def __init__(self, wire: MemoryWire, tenant: str) -> None:
        self.wire = wire
        own = wire.inbox.rpartition(".")[2]
        self.tenant = tenant
        self.name = f"{tenant_inbox(tenant)}.{own}" if tenant else f"{INBOX_PREFIX}{own}.r1"
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()

    @classmethod
    async def open(cls, broker: MemoryBroker, tenant: str = "") -> Inbox:
        inbox = cls(MemoryWire(broker), tenant)
        await inbox.wire.subscribe(inbox.name, inbox.on_delivery)
        return inbox

    def on_delivery(self, delivery: Delivery) -> None:
        self.messages.put_nowait(delivery.body)

    async def send(self, protocol: Protocol, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.wire.publish(api(protocol, self.tenant), raw, reply=self.name, headers=headers)

    async def next(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.messages.get()

    async def all(self) -> list[dict[str, Any]]:
        """All messages up to the sentinel."""
        return [json.loads(message) async for message in self._until_sentinel()]

    async def _until_sentinel(self) -> AsyncIterator[bytes]:
        while message := await self.next():
            yield message


@asynccontextmanager
async def edge(
    card: ModelCard,
    *,
    keys: str = "",
    tenants: str = "",
    text: str = "Hello there!",
    broker: MemoryBroker | None = None,
    fetch: Fetch = FETCH,
) -> AsyncIterator[Edge]:
    """Everything started; everything stopped at the end, and no crash left unnoticed. `tenants` is the file's text."""
    broker, hub = broker or MemoryBroker(), MemoryHub()
    known = Tenants.parse(tenants, "tenants.toml")
    buses, bulks = [], []
    for _ in range(4):
        bus, bulk = Bus(MemoryWire(broker)), MemoryBulk(hub)
        await bus.open()
        await bulk.start()
        buses.append(bus)
        bulks.append(bulk)
    answer = Converter(card).tokenizer.encode(text)
    entrypoint = FakeEntrypoint("e0", buses[0], answer)
    recipe = Recipe("rc0", buses[1], bulks[1], card, known, fetch)
    gateway = Gateway("g0", buses[2], bulks[2], port=0, keys=Keys.parse(keys, known))
    quota = Quota("q0", buses[3], known)
    system = Edge(broker, hub, card, entrypoint, recipe, gateway, quota)
    try:
        for name, actor in zip("ergq", (entrypoint, recipe, gateway, quota), strict=True):
            await system.start(name, actor)
        yield system
    finally:
        crashed = [task for task in system.tasks.values() if task.done() and not task.cancelled()]
        for task in reversed(system.tasks.values()):
            task.cancel()
            await asyncio.wait([task], timeout=TIMEOUT_S)
        for bus in buses:
            await bus.close()
        for task in crashed:
            task.result()


def content(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@asynccontextmanager
async def silent(card: ModelCard) -> AsyncIterator[Edge]:
    """An edge whose entrypoint waits for the test to speak."""
    async with edge(card) as system:
        system.entrypoint.is_silent = True
        yield system


async def submitted(entrypoint: FakeEntrypoint, num: int = 1) -> list[str]:
    await entrypoint.until(lambda: len(entrypoint.submitted) >= num)
    return list(entrypoint.submitted)
