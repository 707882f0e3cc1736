"""Which models of timm and torchvision couple, and how exactly: try them all.

    python scripts/coverage.py coverage.jsonl                 # all of them, hours on two cores
    python scripts/coverage.py coverage.jsonl resnet deit_    # those that begin so
    python scripts/coverage.py coverage.jsonl --every 40      # a sample

Each is halved, coupled with random weights and proved, in a process of its own with a time limit. A
line is added to the file for each; what the file has is not tried again, so a stopped run goes on.
The table at the end counts architectures by the module they are defined in.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import timm
import torchvision

from rbdc.models.create import TORCHVISION

ONE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from rbdc.errors import RbdcError
from rbdc.models import as_spec
from rbdc.models.explain import explain
try:
    found = explain(as_spec(sys.argv[1]))
    cause = next(iter(found.structure.inexact.items()), ("", ""))
    print(json.dumps({"couples": True, "exact": found.proof.holds, "error": found.proof.error,
                      "cause": ": ".join(filter(None, cause))}))
except RbdcError as error:
    print(json.dumps({"couples": False, "exact": False, "cause": error.problem}))
"""


def names() -> list[str]:
    others = torchvision.models.list_models(module=torchvision.models)
    return [*timm.list_models(), *(f"{TORCHVISION}{name}" for name in others)]


def module_of(name: str) -> str:
    if name.startswith(TORCHVISION):
        return "torchvision"
    return str(timm.models.model_entrypoint(name).__module__.rpartition(".")[2])


def tried(name: str, seconds: float) -> dict[str, object]:
    """Try one model; what kills the process (time, memory) is a cause too."""
    result: dict[str, object] = {"couples": False, "exact": False}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ONE, name],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        end = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        result |= json.loads(lines[-1]) if done.returncode == 0 and lines else {"cause": end}
    except subprocess.TimeoutExpired:
        result |= {"cause": f"it takes more than {seconds:g} s"}
    return {"name": name, "module": module_of(name), **result}


def table(rows: list[dict[str, object]]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for of in (str(row["module"]), "all"):
            counts[of].update(n=1, couples=bool(row["couples"]), exact=bool(row["exact"]))
    lines = ["| module | architectures | couple | exact |", "|---|---|---|---|"]
    for module, one in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"| {module} | {one['n']} | {one['couples']} | {one['exact']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Try which models couple.")
    parser.add_argument("file", type=Path)
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="try only every n-th model")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one model")
    options = parser.parse_args()
    known = options.file.read_text().splitlines() if options.file.exists() else []
    rows = [json.loads(line) for line in known]
    done = {row["name"] for row in rows}
    wanted = [n for n in names() if n.startswith(tuple(options.prefixes) or "")][:: options.every]
    with options.file.open("a") as file:
        for name in wanted:
            if name not in done:
                rows.append(tried(name, options.seconds))
                print(json.dumps(rows[-1]), file=file, flush=True)
    print(table([row for row in rows if row["name"] in wanted]))


if __name__ == "__main__":
    main()
