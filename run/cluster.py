"""The cluster file: which actors run in which process."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kernels.config import ModelConfig
from kernels.places import num_redundant
from schemas.message import Role

DEFAULT_CLUSTER = Path(__file__).parent / "clusters" / "laptop.toml"
DEFAULT_SLOTS = 64
COMPUTING = frozenset({Role.VISION, Role.PREFILL, Role.DECODE})
SEEING = frozenset({Role.VISION, Role.VISION_BALANCER})
OPTIONAL = SEEING | {Role.METADATA, Role.KVSTORE, Role.WRITER, Role.QUOTA, Role.EXPERT_BALANCER}
"""Without them there are no images, no cached prefixes, no limits of tenants, and experts stay where they are."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NOT_IDS = frozenset({"any", "all"})  # destinations of their own on the bus
_KEYS = {"name": str, "actors": list, "threads": int, "slots": int, "ep": int, "redundant": int, "least": int}
_BOUNDS = {"threads": (1, 4096), "slots": (1, 65536), "ep": (1, 1024), "redundant": (0, 65536), "least": (1, 1024)}
GROUPED = frozenset({Role.PREFILL, Role.DECODE})
"""Who can be in an expert-parallel group."""


class ClusterError(ValueError):
    """A cluster file, or an actor's name, that cannot be used. Says where, what is wrong and what to do."""


class Member(NamedTuple):
    """One actor: what it is and which one. Written `role/id`."""

    role: Role
    id: str

    def __str__(self) -> str:
        return f"{self.role}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> Member:
        """Read `role/id`. Raises ClusterError."""
        role, slash, id = text.partition("/")
        if role not in list(Role):
            raise ClusterError(f"{text!r}: there is no role {role!r}; choose from {', '.join(Role)}")
        if not slash or not _NAME.fullmatch(id) or id in _NOT_IDS:
            raise ClusterError(f"{text!r}: write {role}/ID, with an ID of letters, digits, - and _ (not any or all)")
        return cls(Role(role), id)


@dataclass(frozen=True)
class GroupPlace:
    """A process's place in an expert-parallel group: its `rank` among the actors `ids`; each layer has at least
    `num_redundant` copies beyond one of each expert. Fewer than `least` ranks do not go on without the others."""

    ids: tuple[str, ...]
    rank: int
    num_redundant: int = 0
    least: int = 1

    @classmethod
    def parse(cls, members: Sequence[Member], ranks: str, redundant: int, least: int) -> GroupPlace | None:
        """As given on a command line; None without ranks. Raises ClusterError."""
        if not ranks:
            if redundant or least != 1:
                raise ClusterError("--redundant and --least are of a group; give its --ranks, too")
            return None
        ids = tuple(ranks.split(","))
        if len(members) != 1 or members[0].role not in GROUPED or members[0].id not in ids:
            raise ClusterError(f"--ranks {ranks}: give one prefill or decode actor, whose id is among them")
        if len(ids) < 2 or len(set(ids)) != len(ids) or not all(map(_NAME.fullmatch, ids)):
            raise ClusterError(f"--ranks {ranks}: give two or more ids, with commas between and each once")
        if redundant < 0:
            raise ClusterError(f"--redundant {redundant}: give 0 or more")
        if not 1 <= least <= len(ids):
            raise ClusterError(f"--least {least}: give 1 to {len(ids)}, as there are so many ranks")
        return cls(ids, ids.index(members[0].id), redundant, least)


@dataclass(frozen=True)
class ProcessSpec:
    """One OS process of a cluster. `num_threads` is what its engines may use, `num_slots` what each holds.

    In a `group` it has one actor, a rank.
    """

    name: str
    members: tuple[Member, ...]
    num_threads: int
    num_slots: int = DEFAULT_SLOTS
    group: GroupPlace | None = None

    @property
    def unit(self) -> str:
        """What it starts and stops with, at once: its group, by the first rank, or else the process alone."""
        return self.name if self.group is None else f"group {self.members[0].role}/{self.group.ids[0]}"


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cluster(path: Path) -> tuple[ProcessSpec, ...]:
    """The processes of a cluster file, in order. Raises ClusterError with the file, the key and what to do."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        raise ClusterError(f"{path}: not found; copy {DEFAULT_CLUSTER} and change the copy") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path}: not TOML: {error}") from None
    tables = content.pop("process", [])
    if content:
        raise ClusterError(f"{path}: unknown key {next(iter(content))!r}; a cluster file holds [[process]] tables only")
    if not isinstance(tables, list) or not tables:
        raise ClusterError(f"{path}: no [[process]]; write one for each process, with its name and actors")
    for number, table in enumerate(tables, 1):
        _check_types(f"{path}: process {number}", table)
    num_computing = sum(
        max(table.get("ep", 1), 1)  # read before it is checked
        for table in tables
        if any(str(actor).partition("/")[0] in COMPUTING for actor in table["actors"])
    )
    share = max(1, num_cores() // max(1, num_computing))
    specs = tuple(
        spec
        for number, table in enumerate(tables, 1)
        for spec in _processes(f"{path}: process {number}", table, share)
    )
    _check_cluster(path, specs)
    return specs


def _check_types(where: str, table: Any) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise ClusterError(f"{where}: unknown key {key!r}; choose from {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ClusterError(f"{where}: {key} must be of type {_KEYS[key].__name__}, not {value!r}")
    for key in ("name", "actors"):
        if not table.get(key):
            raise ClusterError(f"{where}: {key} is missing or empty; add it")


def _processes(where: str, table: dict[str, Any], share: int) -> tuple[ProcessSpec, ...]:
    """One, or with `ep` one for each rank."""
    spec, size, redundant = _process(where, table, share), table.get("ep", 1), table.get("redundant", 0)
    least = table.get("least", 1)
    if least > size:
        raise ClusterError(f"{where} ({spec.name}): least must be at most ep, {size}, not {least}")
    if size == 1:
        if redundant:
            raise ClusterError(f"{where} ({spec.name}): redundant experts need a group; set ep to 2 or more")
        return (spec,)
    role = spec.members[0].role
    if len(spec.members) != 1 or role not in GROUPED:
        raise ClusterError(f"{where} ({spec.name}): with ep, actors must be one prefill or decode actor")
    ids = tuple(f"{spec.members[0].id}-{rank}" for rank in range(size))
    return tuple(
        replace(
            spec,
            name=f"{spec.name}-{rank}",
            members=(Member(role, id),),
            group=GroupPlace(ids, rank, redundant, least),
        )
        for rank, id in enumerate(ids)
    )


def _process(where: str, table: dict[str, Any], share: int) -> ProcessSpec:
    name = table["name"]
    if not _NAME.fullmatch(name):
        raise ClusterError(f"{where}: name {name!r} may hold letters, digits, - and _ only")
    for key, (least, most) in _BOUNDS.items():
        if table.get(key, least) < least:
            raise ClusterError(f"{where} ({name}): {key} must be at least {least}, not {table[key]}")
        if table.get(key, least) > most:
            raise ClusterError(f"{where} ({name}): {key} must be at most {most:,}, not {table[key]}")
    members = []
    for text in table["actors"]:
        if not isinstance(text, str):
            raise ClusterError(f'{where} ({name}): actors must be strings such as "decode/d0", not {text!r}')
        try:
            members.append(Member.parse(text))
        except ClusterError as error:
            raise ClusterError(f"{where} ({name}): actors: {error}") from None
    return ProcessSpec(name, tuple(members), table.get("threads", share), table.get("slots", DEFAULT_SLOTS))


def _check_cluster(path: Path, specs: tuple[ProcessSpec, ...]) -> None:
    names: set[str] = set()
    homes: dict[Member, str] = {}
    for spec in specs:
        if spec.name in names or spec.name == "broker":
            raise ClusterError(f"{path}: name {spec.name!r} is taken; give each process a name of its own")
        names.add(spec.name)
        for member in spec.members:
            if member in homes:
                raise ClusterError(
                    f"{path}: actors: {member} is in {homes[member]} and in {spec.name}; rename one of them"
                )
            homes[member] = spec.name
    needed = [role for role in Role if role not in OPTIONAL]
    present = {member.role for member in homes}
    if Role.VISION in present:
        needed.append(Role.VISION_BALANCER)
    missing = [role for role in needed if role not in present]
    if missing:
        raise ClusterError(f'{path}: actors: there is no {missing[0]}; add "{missing[0]}/ID" to a process')
    gateways = [str(member) for member in homes if member.role is Role.GATEWAY]
    if len(gateways) > 1:
        raise ClusterError(f"{path}: actors: {' and '.join(gateways)} would share one HTTP port; keep one gateway")


def without_vision(specs: tuple[ProcessSpec, ...]) -> tuple[ProcessSpec, ...]:
    """The same cluster for a checkpoint that sees no images: a process that would only do that is not started."""
    kept = [replace(spec, members=tuple(m for m in spec.members if m.role not in SEEING)) for spec in specs]
    return tuple(spec for spec in kept if spec.members)


def check_experts(specs: tuple[ProcessSpec, ...], config: ModelConfig) -> None:
    """Raise ClusterError when the experts of a checkpoint do not go to the ranks of a group."""
    groups = {spec.unit: spec.group for spec in specs if spec.group is not None}
    for unit, group in groups.items():
        for role in (*config.layers, *config.draft_stages):
            try:
                if len(group.ids) > role.num_experts:
                    raise ValueError(f"{role.num_experts} experts, so that some ranks would hold copies only")
                num_redundant(role.num_experts, len(group.ids), group.num_redundant)
            except ValueError as error:
                why = f"ep = {len(group.ids)}, redundant = {group.num_redundant}: {role.name} of SHOAL_MODEL: {error}"
                raise ClusterError(f"{unit}: {why}") from None


def parse_actors(texts: tuple[str, ...]) -> tuple[Member, ...]:
    """Actors as given on a command line; an id of `-` stands for this host's name. Raises ClusterError."""
    if not texts:
        raise ClusterError("no actors given; name at least one, such as decode/d0")
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    return tuple(Member.parse(text.removesuffix("-") + host if text.endswith("/-") else text) for text in texts)
