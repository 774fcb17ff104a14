"""Who is here, for NATS tools: `nats micro ls`, and anyone who asks `$SRV.PING` (NATS ADR-32)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec

from bus.bus import Delivery, Wire
from bus.subjects import is_inbox

_TYPE = "io.nats.micro.v1.{}_response"


class Directory:
    """The services of one connection. Answers PING, INFO and STATS: to all, to one name, to one instance.

    Actors are listed without endpoints: requests go to `shoal.api.>`, and who serves them is not the client's concern.
    Like every stranger, who asks is answered on an inbox only.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._services: list[dict[str, Any]] = []
        self._subjects: set[str] = set()
        self._answers: set[asyncio.Task[None]] = set()

    async def announce(self, role: str, id: str, version: str) -> None:
        """List one actor, from now on until the connection ends."""
        name = f"shoal-{role}"
        started = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        metadata = {"role": role, "id": id}
        self._services.append({"name": name, "id": id, "version": version, "metadata": metadata, "started": started})
        for subject in ("$SRV.*", f"$SRV.*.{name}", f"$SRV.*.{name}.{id}"):
            if subject not in self._subjects:
                self._subjects.add(subject)
                await self._wire.subscribe(subject, self._on_request)
        await self._wire.flush()

    def _on_request(self, delivery: Delivery) -> None:
        _, verb, *wanted = delivery.subject.split(".")
        if verb not in ("PING", "INFO", "STATS") or not is_inbox(delivery.reply):
            return
        for service in self._services:
            if wanted == [service["name"], service["id"]][: len(wanted)]:
                answer = asyncio.ensure_future(self._wire.publish(delivery.reply, _answer(verb, service)))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)


def _answer(verb: str, service: dict[str, Any]) -> bytes:
    answer = {key: service[key] for key in ("name", "id", "version", "metadata")}
    answer["type"] = _TYPE.format(verb.lower())
    if verb == "INFO":
        answer |= {"description": f"Shoal {service['metadata']['role']}", "endpoints": []}
    elif verb == "STATS":
        answer |= {"started": service["started"], "endpoints": []}
    return msgspec.json.encode(answer)
