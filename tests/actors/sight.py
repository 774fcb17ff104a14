"""Entrypoint, prefill and decode with vision replicas before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from actors.vision.actor import Vision
from bus.subjects import EXITED, RESOLVE_IMAGE
from schemas.bulk import Payload
from schemas.liveness import ProcessExited
from schemas.request import Submit
from schemas.vision import Image, ResolveImage
from tests.actors.builders import prompt_bytes, submit
from tests.actors.core import Core, core
from tests.actors.eyes import CONFIG, FakeEncoder

TOKEN = 99
TIMEOUT_S = 10.0


class Sighted:
    """A core with vision replicas."""

    def __init__(self, system: Core) -> None:
        self.core = system
        self.encoders: dict[str, FakeEncoder] = {}

    async def with_vision(self, id: str) -> Vision:
        encoder = self.encoders[id] = FakeEncoder()
        name = f"vision/{id}"
        vision = Vision(id, await self.core.bus(name), await self.core.bulk(name), encoder, CONFIG)
        await self.core.add(vision)
        return vision

    async def submit(self, *files: bytes, request_id: str = "r1", **fields: Any) -> Submit:
        """A request of five tokens, an image, five tokens, an image, …"""
        bus, images, prompt = self.core.listener.bus, list[Image](), prompt_bytes(5)
        for file in files:
            wanted = ResolveImage(image=Payload(inline=file))
            found = await bus.ask(RESOLVE_IMAGE.any(), wanted, timeout_s=TIMEOUT_S)
            names = ("num_tokens", "digest", "width", "height", "vision", "pixels", "num_patches")
            images.append(Image(start=len(prompt) // 4, **{name: getattr(found, name) for name in names}))
            prompt += np.full(found.num_tokens, TOKEN, dtype="<u4").tobytes() + prompt_bytes(5)
        payload = Payload(inline=prompt)
        num = len(prompt) // 4
        return submit(request_id, prompt=payload, num_prompt_tokens=num, images=images, **fields)

    async def kill(self, id: str) -> None:
        """End a replica without a word, as a supervisor sees it."""
        self.core.kill(f"vision/{id}")
        exited = ProcessExited(name="eyes", pid=1, members=[f"vision/{id}"])
        await self.core.listener.bus.tell(EXITED.all(), exited)


@asynccontextmanager
async def sighted(num_vision: int = 1, **fields: Any) -> AsyncIterator[Sighted]:
    async with core(**fields) as system:
        eyes = Sighted(system)
        await system.add_vision_balancer()
        for index in range(num_vision):
            await eyes.with_vision(f"v{index}")
        yield eyes


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)
