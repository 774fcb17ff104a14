"""Asking until someone answers: for what must be heard, and may be heard twice."""

from __future__ import annotations

from typing import TypeVar

from bus.bus import Bus, BusError
from bus.subjects import Address
from schemas.failure import Code
from schemas.message import Message

M = TypeVar("M", bound=Message)
R = TypeVar("R")


async def insist(bus: Bus, address: Address[M, R], message: M, *, timeout_s: float, tries: int) -> R | None:
    """The answer; asked again after each silence of `timeout_s`. None if there is nobody, a refusal, or no answer."""
    for _ in range(tries):
        try:
            return await bus.ask(address, message, timeout_s=timeout_s)
        except BusError as error:
            if error.code is not Code.DEADLINE_EXCEEDED:
                break
    return None
