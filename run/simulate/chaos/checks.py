"""What must hold of the actors at any time, and what once all is quiet (design §7)."""

from __future__ import annotations

from collections.abc import Iterator

from actors.balancers.actor import Balancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.entrypoint.shard import Heard
from actors.prefill.actor import Prefill
from actors.rules.load import promised_tokens
from actors.writer.actor import Writer
from bus.actor import Actor
from bus.bulk import MemoryBulk
from bus.bus import Delivery, decoder
from bus.keeper import Keeper
from bus.memory import MemoryWire
from bus.shelf import Offer
from run.simulate.chaos.broker import ChaosWire
from run.simulate.chaos.clients import PER_MINUTE, Violate
from run.simulate.chaos.truth import ChaosEngine
from run.simulate.chaos.world import ChaosWorld
from schemas.handover import Dispatch, HandOver
from schemas.message import Role
from schemas.request import TokensEmitted
from schemas.routing import Release

OWNERS_S = 30.0
"""A replica that goes on with a request of which another is the owner is told so within this time."""


WITH_FIRST_WORK = {"Pulse._watch"}
"""Tasks that stay, and begin late."""


class Checks:
    """Watches one world. `start` is to be called when it is up, and quiet; `hear` with all that is sent."""

    def __init__(self, violate: Violate) -> None:
        self._violate = violate
        self.releases = Releases(violate)
        self._usual: dict[str, set[str]] = {}
        self._watched: set[int] = set()
        self._strangers: dict[tuple[str, str, int], float] = {}

    def start(self, world: ChaosWorld) -> None:
        """What is there now is always there."""
        self._usual = {actor.role: set(_tasks(actor)) | WITH_FIRST_WORK for actor in world.actors.values()}

    def check(self, world: ChaosWorld, now_s: float) -> None:
        """At any moment between two steps of the loop."""
        for name, task in world.tasks.items():
            if task.done() and not world.wire(name).is_cut:
                error = None if task.cancelled() else task.exception()
                self._violate("crash", f"{name} has ended by itself: {error!r}")
        for name, actor in _living(world):
            match actor:
                case Decode():
                    for wrong in decode_wrongs(actor, world.engines[name]):
                        self._violate("pages", f"{name}: {wrong}")
                case Entrypoint():
                    self._watch(name, actor)
                    for wrong in entrypoint_wrongs(actor):
                        self._violate("owners", f"{name}: {wrong}")
                case Balancer():
                    for wrong in balancer_wrongs(actor):
                        self._violate("reservations", f"{name}: {wrong}")
            if isinstance(actor, Decode | Prefill):
                for wrong in snapshot_wrongs(actor.keeper, world.bulks[name]):
                    self._violate("snapshots", f"{name}: {wrong}")
        self._check_owners(world, now_s)

    def residue(self, world: ChaosWorld) -> dict[str, int]:
        """What is held though nothing is going on: all zero when all is at its baseline."""
        found = {}
        for name, actor in _living(world):
            for what, number in residue(actor, world.engines.get(name)).items():
                found[f"{name}: {what}"] = number
            for task in set(_tasks(actor)) - self._usual[actor.role]:
                found[f"{name}: {task}"] = 1
            if name in world.bulks:
                keeper = getattr(actor, "keeper", None)
                num_kept = len(keeper.snapshots) if keeper is not None else 0
                found[f"{name}: offers"] = world.bulks[name].num_offers - num_kept
        return {what: number for what, number in found.items() if number}

    def _check_owners(self, world: ChaosWorld, now_s: float) -> None:
        """One replica goes on with a request: the one its entrypoint names, or, for a while, who has not heard yet."""
        entrypoints = {actor.id: actor for _, actor in _living(world) if isinstance(actor, Entrypoint)}
        still = dict[tuple[str, str, int], float]()
        for name, actor in _living(world):
            if not isinstance(actor, Decode) or world.wire(name).num_apart or world.wire(name).num_still:
                continue
            for generation in actor.slots.running():
                owner = entrypoints.get(generation.offer.entrypoint)
                request = owner.shard.get(generation.id) if owner is not None else None
                if request is not None and request.end is None and request.epoch == generation.epoch:
                    continue
                key = (name, generation.id, generation.epoch)
                still[key] = self._strangers.get(key, now_s)
                if now_s - max(still[key], world.script.calm_s) > OWNERS_S:
                    self._violate("owners", f"{name} goes on with {generation.id}, which is not its own (any more)")
        self._strangers = still

    def _watch(self, name: str, entrypoint: Entrypoint) -> None:
        """See to it that nothing changes by words of an epoch that is over."""
        if id(entrypoint) in self._watched:
            return
        self._watched.add(id(entrypoint))
        shard, hear = entrypoint.shard, entrypoint.shard.hear

        def watched(emitted: TokensEmitted, now_s: float) -> Heard:
            before = {}
            for request_id in emitted.request_ids:
                if (request := shard.get(request_id)) is not None:
                    before[request_id] = (request.epoch, len(request.tokens), request.end, request.num_rebuilt)
            heard = hear(emitted, now_s)
            for request_id, (epoch, *was) in before.items():
                if (request_id, epoch) in zip(emitted.request_ids, emitted.epochs, strict=True):
                    continue
                request = shard.get(request_id)
                if request is None or [len(request.tokens), request.end, request.num_rebuilt] != was:
                    self._violate("epochs", f"{name}: {request_id} changes by a word that is not of its epoch {epoch}")
            return heard

        shard.hear = watched  # type: ignore[method-assign]


def limit_wrongs(world: ChaosWorld, num_admitted: int) -> Iterator[str]:
    """A tenant with a limit gets no more than that from each quota actor there was: scripts are shorter than the
    minute in which as many may come again."""
    num_actors = world.script.shape.quota + sum(name.startswith("quota/") for name in world.killed)
    if num_admitted > num_actors * (PER_MINUTE + 1):
        yield f"{num_admitted} requests were let in by {num_actors} quota actors, each lets in {PER_MINUTE} a minute"


class Releases:
    """Every reservation that was used is released: by someone, and by nobody twice."""

    def __init__(self, violate: Violate) -> None:
        self._violate = violate
        self._used: dict[tuple[str, int], tuple[ChaosWire, str]] = {}
        self._released: dict[tuple[str, int], list[ChaosWire]] = {}
        self._num_used: dict[tuple[str, int], int] = {}

    def hear(self, source: MemoryWire, delivery: Delivery) -> None:
        """Something is sent."""
        assert isinstance(source, ChaosWire)
        prefix, _, verb = delivery.subject.rpartition(".")
        if verb == "release" and not prefix.startswith("shoal.vision."):  # there it is of what is held
            release = decoder(Release).decode(delivery.body)
            key = (prefix.rpartition(".")[2], release.reservation)
            self._released.setdefault(key, []).append(source)
        elif verb in ("dispatch", "handover"):
            message: Dispatch | HandOver = decoder(Dispatch if verb == "dispatch" else HandOver).decode(delivery.body)
            role = Role.PREFILL if verb == "dispatch" else Role.DECODE
            self._used[(message.balancer, message.reservation)] = source, f"{role}/{prefix.rpartition('.')[2]}"

    def check(self, world: ChaosWorld) -> None:
        """Once all is quiet."""
        doubled = world.chaos.num_doubled
        for key, sources in self._released.items():
            if not doubled and len(set(map(id, sources))) < len(sources):
                self._violate("reservations", f"reservation {key[1]} at {key[0]} is released twice by one actor")
        for key, (asker, holder) in self._used.items():
            if key not in self._released and not asker.is_cut and holder not in world.killed:
                self._violate("reservations", f"reservation {key[1]} at {key[0]}, of {holder}, is released by nobody")


def _tasks(actor: Actor) -> list[str]:
    """What its tasks do, by name."""
    return [task.get_coro().__qualname__ for task in actor._tasks]  # type: ignore[union-attr]


def _living(world: ChaosWorld) -> list[tuple[str, Actor]]:
    return [(name, actor) for name, actor in world.actors.items() if world.is_alive(name)]


def decode_wrongs(decode: Decode, engine: ChaosEngine) -> Iterator[str]:
    """Each page has one owner, and there are as many as are counted."""
    reserved = engine.reserved()
    here = {generation.id: generation for generation in decode.slots if generation.is_in_engine}
    for id in reserved.keys() ^ here.keys():
        yield f"the engine {'holds' if id in reserved else 'does not hold'} {id}, its slots say otherwise"
    for id in reserved.keys() & here.keys():
        if reserved[id] > here[id].num_reserved:
            yield f"{id} has room for {reserved[id]} tokens, and is counted for {here[id].num_reserved}"
    if decode.slots.num_free_blocks < 0:
        yield f"{-decode.slots.num_free_blocks} blocks more are given away than there are"
    if sum(map(promised_tokens, reserved.values())) > engine.info.capacity_tokens:
        yield "the engine gave away more blocks than it has"


def entrypoint_wrongs(entrypoint: Entrypoint) -> Iterator[str]:
    """Each live request is somebody's, or somebody looks for a place for it."""
    live = list(entrypoint.shard.live())
    if len(live) != entrypoint.shard.num_live:
        yield f"{len(live)} requests are live, {entrypoint.shard.num_live} are counted"
    for request in live:
        if request.owner is None and not request.is_placing:
            yield f"{request.id} is nobody's, and nobody looks for a place for it"


def balancer_wrongs(balancer: Balancer) -> Iterator[str]:
    """Each reservation is at one replica."""
    ledger = balancer.ledger
    at = [(number, replica.id) for replica in ledger._replicas.values() for number in replica.reserved]
    if dict(at) != ledger._holder or len(at) != len(ledger._holder):
        yield f"reservations at replicas, {sorted(at)}, are not those that it knows, {sorted(ledger._holder.items())}"


def snapshot_wrongs(keeper: Keeper, bulk: MemoryBulk) -> Iterator[str]:
    """What is kept can be pulled."""
    for kept in keeper.snapshots._pool.values():
        handle = kept.snapshot.handle
        if not isinstance(bulk._shelf.find(handle.key, handle.generation), Offer):
            yield f"a snapshot is kept, and its offer {handle.key.lstrip('0')} is not"


def residue(actor: Actor, engine: ChaosEngine | None) -> dict[str, int]:
    """What an actor and its engine hold of requests, by name."""
    found = {
        "mailbox": len(actor._mailbox),
        "asked": len(actor._pending),
        "asks": len(actor.bus._waiting) - len(actor.bus._watched),
    }
    match actor:
        case Entrypoint():
            found |= {"requests": actor.shard.num_live}
        case Prefill() | Decode():
            found |= {"reservations": len(actor.load().reservations)}
        case Balancer():
            found |= {"reservations": actor.ledger.num_reserved}
        case Writer():
            detail = actor.load().detail
            busy = actor.slots.num_slots - actor.slots.num_free() - actor.slots.num_blocks - len(actor.slots._stuck)
            found |= {"stores": actor.load().num_running, "bytes": int(detail["work_bytes"]), "busy slots": busy}
    return found if engine is None else {**found, "engine": len(engine.reserved())}
