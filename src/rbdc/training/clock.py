"""Time spent, by the clock on the wall and by the CPU time of this process.

Elapsed time is what a user waits for. CPU time is the fairer cost on a machine that does other
things, too; processes that decode images have their own and are not in it.
"""

import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of work, or since some moment."""

    elapsed: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Self:
        """Return the time of both clocks, to be subtracted from a later one."""
        return cls(time.monotonic(), time.process_time())

    @classmethod
    def since(cls, began: Self) -> Self:
        """Return what was spent since `began`."""
        return cls.now() + began * -1

    def to_json(self) -> dict[str, float]:
        """Return the entries of result.json."""
        return {"seconds": self.elapsed, "cpu_seconds": self.cpu}

    def __add__(self, other: Self) -> Self:
        return type(self)(self.elapsed + other.elapsed, self.cpu + other.cpu)

    def __mul__(self, factor: float) -> Self:
        return type(self)(self.elapsed * factor, self.cpu * factor)
