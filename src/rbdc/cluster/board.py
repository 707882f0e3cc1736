"""Between a driver on a Ray cluster and its workers: progress one way, the wish to stop the other.

The actor's process imports only this, and needs nothing of ours.
"""

import asyncio


class Board:
    """Where workers pin what they have to tell, and wait to hear that they should stop."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bytes]] = []
        self.stop = asyncio.Event()

    async def pin(self, attempt: str, note: bytes) -> None:
        self.notes.append((attempt, note))

    async def take(self) -> list[tuple[str, bytes]]:
        """Everything that was pinned since the last time."""
        notes, self.notes = self.notes, []
        return notes

    async def end(self) -> None:
        """Tell everyone to stop."""
        self.stop.set()

    async def ended(self) -> bool:
        """Answers when everyone is to stop, and not before."""
        return await self.stop.wait()
