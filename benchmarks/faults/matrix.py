"""Cases and their outcomes, the journal that they are written to, and the table of them."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Verdict = Literal["same", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended."""

    verdict: Verdict
    why: str = ""
    """What went wrong, or what was refused."""
    tried: int = 1
    """Faults of the case."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else was measured."""


def same(tried: int = 1, **facts: Any) -> Outcome:
    """Return that the run ended with the bits of one without faults."""
    return Outcome(verdict="same", tried=tried, facts=facts)


def refused(why: str, tried: int = 1, **facts: Any) -> Outcome:
    """Return that the fault was said in two lines, and nothing else happened."""
    return Outcome(verdict="refused", why=why, tried=tried, facts=facts)


def failed(why: str, tried: int = 1, **facts: Any) -> Outcome:
    """Return that a promise was broken."""
    return Outcome(verdict="failed", why=why, tried=tried, facts=facts)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and how one case of it is tried."""

    name: str
    text: str
    """What is done, for the table."""
    cases: int
    """How many cases make the full count."""
    attempt: Callable[[int, random.Random], Outcome]
    """Try the case with this number. The random numbers are functions of kind, seed and number."""


def draws(kind: str, seed: int, number: int) -> random.Random:
    """Return the random numbers of a case."""
    return random.Random(f"{kind}:{seed}:{number}")


class Journal:
    """A JSONL file with a line per case; the last line of a case counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the last outcome of each case, by `kind:seed:number`."""
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["case"]: row for row in found}

    def add(self, case: str, outcome: Outcome, seconds: float) -> None:
        """Write a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"case": case, **asdict(outcome), "seconds": round(seconds, 2)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def missing(
    kinds: Iterable[Kind], count: int | None, seed: int, done: Iterable[str]
) -> Iterator[tuple[Kind, int]]:
    """Yield the cases that are not in the journal, all kinds in turn."""
    known, kinds = set(done), list(kinds)
    most = {kind.name: kind.cases if count is None else min(count, kind.cases) for kind in kinds}
    for number in range(max(most.values(), default=0)):
        for kind in kinds:
            if number < most[kind.name] and f"{kind.name}:{seed}:{number}" not in known:
                yield kind, number


def show_table(kinds: Iterable[Kind], rows: Iterable[dict[str, Any]]) -> None:
    """Print a line per kind, and a line to reproduce each failure."""
    table = Table("kind", "what is done", *("tried", "same bits", "refused", "failed"))
    found = list(rows)
    for kind in kinds:
        of_kind = [row for row in found if row["case"].partition(":")[0] == kind.name]
        if of_kind:
            tried = sum(row["tried"] for row in of_kind)
            ended = (
                sum(row["tried"] for row in of_kind if row["verdict"] == verdict)
                for verdict in ("same", "refused", "failed")
            )
            table.add_row(kind.name, kind.text, str(tried), *map(str, ended))
    console = Console(width=130)
    console.print(table)
    for row in found:
        if row["verdict"] == "failed":
            print(f"python -m benchmarks.faults --only {row['case']}  # {row['why'][:200]}")
