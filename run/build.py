"""Makes an actor from its role. Components are imported when first built, so that torch is only where it computes."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from bus.actor import Actor
from bus.bulk import Bulk
from bus.bus import Bus
from bus.files import Files, PosixFiles
from bus.meeting import GroupOf
from kernels.engine import Engine
from run.cluster import SEEING, Member, ProcessSpec, without_vision
from run.settings import LOOPBACK, Settings, SettingsError
from run.store import need_folder
from schemas.message import Role

MAX_STEP_TOKENS = 512
"""The most tokens of one prefill step: what a decode step of the same process would have to wait for."""


def build(member: Member, bus: Bus, bulk: Bulk, spec: ProcessSpec, settings: Settings) -> Actor:
    """A new actor, not yet started. Raises what the component raises when its settings or its checkpoint are wrong."""
    match member.role:
        case Role.GATEWAY:
            from actors.gateway.actor import Gateway
            from actors.gateway.keys import Keys

            keys = Keys.parse(settings.api_keys, settings.tenants())
            return Gateway(member.id, bus, bulk, port=settings.http_port, host=settings.host, keys=keys)
        case Role.RECIPE:
            from actors.recipe.actor import Recipe
            from actors.recipe.card import ModelCard

            return Recipe(member.id, bus, bulk, ModelCard.from_folder(settings.model), settings.tenants())
        case Role.ENTRYPOINT:
            from actors.entrypoint.actor import Entrypoint

            return Entrypoint(member.id, bus, bulk)
        case Role.QUOTA:
            from actors.quota.actor import Quota

            return Quota(member.id, bus, settings.tenants())
        case Role.PREFILL_BALANCER:
            from actors.balancers.actor import PrefillBalancer

            return PrefillBalancer(member.id, bus)
        case Role.DECODE_BALANCER:
            from actors.balancers.actor import DecodeBalancer

            return DecodeBalancer(member.id, bus)
        case Role.VISION_BALANCER:
            from actors.balancers.actor import VisionBalancer

            return VisionBalancer(member.id, bus)
        case Role.EXPERT_BALANCER:
            from actors.balancers.actor import ExpertBalancer

            return ExpertBalancer(member.id, bus)
        case Role.VISION:
            from actors.vision.actor import Vision
            from kernels.config import ModelConfig
            from kernels.encoder import LocalEncoder

            config = ModelConfig.from_folder(settings.model).vision
            if config is None:
                raise SettingsError(f"SHOAL_MODEL={settings.model}: no vision_config, so there is nothing for {member}")
            return Vision(member.id, bus, bulk, LocalEncoder(settings.model, num_threads=spec.num_threads), config)
        case Role.PREFILL:
            from actors.prefill.actor import Prefill

            engine, group = _engine(spec, settings)
            return Prefill(member.id, bus, bulk, engine, _files(settings), settings.snapshot_bytes, group)
        case Role.DECODE:
            from actors.decode.actor import Decode

            engine, group = _engine(spec, settings)
            tokenizer = settings.model / "tokenizer.json"
            return Decode(member.id, bus, bulk, engine, settings.snapshot_bytes, group, tokenizer)
        case Role.METADATA:
            from actors.metadata.actor import Metadata

            return Metadata(member.id, bus, bulk)
        case Role.KVSTORE:
            from actors.kvstore.actor import KVStore

            return KVStore(member.id, bus, bulk, _files(settings), settings.store_bytes)
        case Role.WRITER:
            from actors.writer.actor import Writer

            need_folder(settings.store)
            return Writer(member.id, bus, bulk, _files(settings), settings.slab_bytes)
        case _:
            raise SettingsError(f"{member}: not a part of this version")


def serving(specs: tuple[ProcessSpec, ...], settings: Settings) -> tuple[ProcessSpec, ...]:
    """What of these has something to do: without a vision tower nobody sees, and nobody balances those who do.

    Raises SettingsError.
    """
    if all(member.role not in SEEING for spec in specs for member in spec.members):
        return specs
    from actors.recipe.card import CardError, ModelCard

    try:
        return specs if ModelCard.from_folder(settings.model).has_vision else without_vision(specs)
    except CardError as error:
        raise SettingsError(f"SHOAL_MODEL: {error}") from None


def _engine(spec: ProcessSpec, settings: Settings) -> tuple[Engine, GroupOf | None]:
    """An engine that starts a new life, and with whom."""
    from kernels.group import GroupSpec
    from kernels.local import LocalEngine

    rank = None
    if (place := spec.group) is not None:
        host = _own_address(settings)
        rank = GroupSpec(place.rank, len(place.ids), settings.step_timeout_s, place.num_redundant, host)
    engine = LocalEngine(
        settings.model,
        num_slots=spec.num_slots,
        max_step_tokens=MAX_STEP_TOKENS,
        num_threads=spec.num_threads,
        drafts=settings.drafts,
        group=rank,
    )
    if place is None:
        return engine, None
    return engine, GroupOf(place.ids, time.time_ns(), settings.step_timeout_s, place.least)


def _own_address(settings: Settings) -> str:
    """This machine's on its way to the broker, for the other ranks of its group. Nothing is sent."""
    if settings.host == LOOPBACK:
        return LOOPBACK
    broker = urlsplit(settings.nats_url.partition(",")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((broker.hostname or LOOPBACK, broker.port or 4222))
        return str(probe.getsockname()[0])


def _files(settings: Settings) -> Files:
    """The store's folder, for one actor, which closes it. All who name it must see the same one: on more than one
    machine, a folder that they share."""
    return PosixFiles(settings.store)
