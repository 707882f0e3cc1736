"""The command of the fault matrix."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.faults import damage, disks, fuzz, hostile, kills, small
from benchmarks.faults.matrix import Journal, Kind, Outcome, draws, failed, missing, show_table


def all_kinds() -> list[Kind]:
    """Return the kinds of all files, in the order of the table."""
    files = (kills, disks, damage, hostile, fuzz)
    return [kind for file in files for kind in file.kinds()]


def main() -> int:
    """Try what is not in the journal yet, and print the table."""
    options = _options()
    torch.set_num_threads(1)  # processes are copies of this one: other threads would be missing
    small.prepare()
    kinds = [k for k in all_kinds() if not options.kinds or k.name in options.kinds.split(",")]
    if options.only:
        return _again(options.only, kinds)
    journal = Journal(options.journal)
    if not options.table:
        known = journal.rows()
        if options.failed:
            known = {case: row for case, row in known.items() if row["verdict"] != "failed"}
        for kind, number in missing(kinds, options.count, options.seed, known):
            case, began = f"{kind.name}:{options.seed}:{number}", time.monotonic()
            outcome = attempt(kind, options.seed, number)
            journal.add(case, outcome, time.monotonic() - began)
            if outcome.verdict == "failed":
                print(f"{case} failed: {outcome.why}", flush=True)
    rows = journal.rows().values()
    show_table(kinds, rows)
    return int(any(row["verdict"] == "failed" for row in rows))


def attempt(kind: Kind, seed: int, number: int) -> Outcome:
    """Try a case; what it raises is a failure."""
    try:
        return kind.attempt(number, draws(kind.name, seed, number))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}"[:1000])


def _again(case: str, kinds: list[Kind]) -> int:
    name, seed, number = case.split(":")
    kind = next(kind for kind in kinds if kind.name == name)
    outcome = kind.attempt(int(number), draws(name, int(seed), int(number)))
    print(outcome)
    return int(outcome.verdict == "failed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--kinds", default="", help="names with commas (default: all)")
    parser.add_argument("--count", type=int, help="cases of a kind, at most (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, default=Path("build/faults.jsonl"))
    parser.add_argument("--only", metavar="KIND:SEED:NUMBER", help="try one case again")
    parser.add_argument("--failed", action="store_true", help="try the failed cases again, too")
    parser.add_argument("--table", action="store_true", help="print the table alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
