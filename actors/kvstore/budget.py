"""How many bytes the files of blocks may take, and which writer may add one."""

from __future__ import annotations

from collections.abc import Mapping

from actors.rules.location import parse_name

ALLOWED_S = 30.0
"""How long a file that was allowed and is not there counts as being made."""


class Budget:
    """The folder's bytes against `max_bytes`. Files are name to size; other files than slabs do not count.

    Every writer may have one slab, whatever the others have: without any, no block that it owns could ever be stored,
    and no prompt with one of them be hit beyond it. So the folder may exceed the budget by a slab for each writer.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._allowed: dict[str, tuple[int, int, float]] = {}  # writer: slabs it had, bytes of the next, until when

    def may_add(self, writer: str, slab_bytes: int, files: Mapping[str, int], now_s: float) -> bool:
        """Whether a writer may make a file. Asking again before it is there is asking for the same one; with 0 bytes,
        giving it up."""
        slabs = self._count(files)
        self._allowed = {
            other: allowed
            for other, allowed in self._allowed.items()
            if other != writer and allowed[2] > now_s and slabs.get(other, 0) <= allowed[0]
        }
        expected = self.num_bytes + sum(num_bytes for _, num_bytes, _ in self._allowed.values())
        if not slab_bytes or (expected + slab_bytes > self.max_bytes and slabs.get(writer, 0)):
            return False
        self._allowed[writer] = (slabs.get(writer, 0), slab_bytes, now_s + ALLOWED_S)
        return True

    def is_exceeded(self, files: Mapping[str, int]) -> bool:
        """Whether there are more bytes of slabs than should be."""
        self._count(files)
        return self.num_bytes > self.max_bytes

    def _count(self, files: Mapping[str, int]) -> dict[str, int]:
        """Slabs of each writer; notes the bytes of all."""
        slabs: dict[str, int] = {}
        self.num_bytes = 0
        for name, num_bytes in files.items():
            if (parsed := parse_name(name)) is not None:
                self.num_bytes += num_bytes
                slabs[parsed[1]] = slabs.get(parsed[1], 0) + 1
        return slabs
