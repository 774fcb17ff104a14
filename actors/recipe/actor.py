"""The recipe: protocol JSON in, tokens out; tokens in, protocol events out."""

from __future__ import annotations

from actors.recipe.card import ModelCard
from bus.actor import Actor
from bus.bulk import Bulk
from bus.bus import Bus
from schemas.message import Role


class Recipe(Actor):
    """Serves one model card to gateways and to NATS clients."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, card: ModelCard) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._card = card
