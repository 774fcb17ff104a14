"""The gateway: HTTP and SSE on one side, subjects on the other."""

from __future__ import annotations

from actors.gateway.keys import Keys
from bus.actor import Actor
from bus.bulk import Bulk
from bus.bus import Bus
from schemas.message import Role


class Gateway(Actor):
    """Serves HTTP on `port` (0: any free one; the actual one is `.port` once ready).

    Listens on 127.0.0.1 without keys, on all interfaces with them.
    """

    role = Role.GATEWAY

    def __init__(self, id: str, bus: Bus, bulk: Bulk, *, port: int = 8000, keys: Keys | None = None) -> None:
        super().__init__(id, bus)
        self.port = port
        self._bulk = bulk
        self._keys = keys or Keys()
