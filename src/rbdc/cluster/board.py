"""The actor between a driver and its workers on a Ray cluster.

Workers post their progress, and the driver requests a stop. The actor's process imports only this
module, which needs nothing but the standard library.
"""

import asyncio


class Board:
    """A message board: workers post progress, and wait for a request to stop."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bytes]] = []
        self.stop = asyncio.Event()

    async def post(self, attempt: str, note: bytes) -> None:
        """Store the progress of an attempt."""
        self.notes.append((attempt, note))

    async def take(self) -> list[tuple[str, bytes]]:
        """Return and forget everything that was posted since the last call."""
        notes, self.notes = self.notes, []
        return notes

    async def end(self) -> None:
        """Request all workers to stop."""
        self.stop.set()

    async def ended(self) -> bool:
        """Return when a stop is requested, and not before."""
        return await self.stop.wait()
