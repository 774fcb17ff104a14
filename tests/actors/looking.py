"""Prompts with text and images in any order, and vision replicas for them in any world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.vision.actor import Vision
from bus.bus import Bus, Delivery
from bus.memory import MemoryWire
from bus.subjects import RESOLVE_IMAGE
from kernels.engine import Encoder
from kernels.vision_config import VisionConfig
from run.simulator import RecordingBroker, World
from schemas.bulk import Payload
from schemas.request import Submit
from schemas.vision import Image, ResolveImage
from tests.actors.builders import submit
from tests.actors.eyes import CONFIG, FakeEncoder
from tests.actors.sight import TOKEN

Part = int | Sequence[int] | bytes
"""Of a prompt: so many tokens of text, by chance; these tokens; the file of an image."""


class Encodes(RecordingBroker):
    """Counts how often an image was to be encoded. Loses `num_to_lose` messages of hits that were cut short."""

    num = 0
    num_to_lose = 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        self.num += delivery.subject.endswith(".encode")
        if self.num_to_lose and delivery.subject.endswith(".shortened"):
            self.num_to_lose -= 1
        else:
            super().publish(source, delivery)


async def add_vision(world: World, encoder: Encoder | None = None, config: VisionConfig = CONFIG) -> None:
    """A balancer and a replica."""
    bus, bulk = await world.bus("vision/v0"), await world.bulk("vision/v0")
    await world.add_vision_balancer()
    await world.add(Vision("v0", bus, bulk, encoder or FakeEncoder(), config))


async def about(
    bus: Bus, request_id: str, *parts: Part, max_tokens: int = 8, image_token: int = TOKEN, **fields: Any
) -> Submit:
    """A request of these parts; those that begin alike have prompts that do."""
    tokens, images = list[int](), list[Image]()
    for number, part in enumerate(parts):
        if isinstance(part, int):
            tokens += np.random.default_rng(number).integers(100, 900, part).tolist()
        elif isinstance(part, bytes):
            found = await bus.ask(RESOLVE_IMAGE.any(), ResolveImage(image=Payload(inline=part)), timeout_s=10)
            said = {name: getattr(found, name) for name in Image.__struct_fields__ if name != "start"}
            images.append(Image(start=len(tokens), **said))
            tokens += [image_token] * found.num_tokens
        else:
            tokens += part
    prompt = Payload(inline=np.array(tokens, dtype="<u4").tobytes())
    return submit(
        request_id, prompt=prompt, num_prompt_tokens=len(tokens), max_tokens=max_tokens, images=images, **fields
    )
