"""A folder of files that are written in place: where blocks are stored. A seam, like the bus and bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class FileInfo(NamedTuple):
    """One file of the folder."""

    name: str
    size_bytes: int


class Files(Protocol):
    """Nothing here blocks the loop. Every method raises the OSError that the folder gives.

    The folder may be shared by many machines, and vanish, with all in it, at any time.
    """

    async def list(self) -> list[FileInfo]:
        """All files, sorted by name; none when there is no folder."""
        ...

    async def create(self, name: str, size_bytes: int) -> None:
        """A new file of zeros with its room on the disk reserved, in a folder that is made if need be.

        Raises FileExistsError; on any error there is no such new file.
        """
        ...

    async def read(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """The bytes of these (offset, size) in one go; less of what reaches beyond the end."""
        ...

    async def write(self, name: str, parts: Sequence[tuple[int, Buffer]]) -> None:
        """Write these (offset, bytes) within the file; done when readers see them. The last part is written last.

        Raises FileNotFoundError when nobody could find the file any more, whoever still has it open.
        """
        ...

    async def rename(self, name: str, new_name: str) -> None:
        """Atomic: of two who try, one gets FileNotFoundError."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a file."""
        ...

    async def close(self) -> None:
        """Let go of what is open. Idempotent."""
        ...
