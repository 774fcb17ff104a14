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
        self._there_bytes = 0
        self._allowed: dict[str, tuple[int, int, float]] = {}  # writer: slabs it had, bytes of the next, until when

    def num_bytes(self, now_s: float) -> int:
        """What was there when it was last looked at, and what was allowed since and may be there by now."""
        return self._there_bytes + sum(size for _, size, until_s in self._allowed.values() if until_s > now_s)

    def see(self, files: Mapping[str, int]) -> dict[str, int]:
        """This is in the folder now; how many slabs each writer has."""
        slabs: dict[str, int] = {}
        self._there_bytes = 0
        for name, num_bytes in files.items():
            if (parsed := parse_name(name)) is not None:
                self._there_bytes += num_bytes
                slabs[parsed[1]] = slabs.get(parsed[1], 0) + 1
        self._allowed = {
            writer: allowed for writer, allowed in self._allowed.items() if slabs.get(writer, 0) <= allowed[0]
        }
        return slabs

    def may_add(self, writer: str, slab_bytes: int, files: Mapping[str, int], now_s: float) -> bool:
        """Whether a writer may make a file. Asking again before it is there is asking for the same one; with 0 bytes,
        giving it up."""
        num_slabs = self.see(files).get(writer, 0)
        self._allowed.pop(writer, None)
        if not slab_bytes or (self.num_bytes(now_s) + slab_bytes > self.max_bytes and num_slabs):
            return False
        self._allowed[writer] = (num_slabs, slab_bytes, now_s + ALLOWED_S)
        return True

    def is_exceeded(self) -> bool:
        """Whether there are more bytes of slabs than should be."""
        return self._there_bytes > self.max_bytes
