"""Files of runs that were damaged: no wrong figure is shown, and the run ends with the same bits.

A file of any kind is damaged, of a finished run or of one that was killed: a bit is flipped, the
end is cut off, or a range is zeroed. Then `status`, the page's content and the run's own command
must each refuse it in two lines or show what is true. What is refused, `doctor --repair` must mend.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.child import in_child, kill_at, said_by
from benchmarks.faults.matrix import Kind, Outcome, failed, refused, same
from benchmarks.faults.small import about, bits, finished, fresh, root, start, words
from rbdc.errors import RbdcError
from rbdc.report.page import read_state

LOGS = ("log.jsonl", "blocks.jsonl", "summary.csv")
"""They may show another point of a curve; no result comes from them."""


def kinds() -> list[Kind]:
    """Return a kind per damage."""
    made: dict[str, tuple[str, int, Callable[[bytearray, random.Random], bytearray]]] = {
        "flip": ("one bit of a file is flipped", 1200, _flip),
        "truncate": ("a file's end is cut off", 500, _truncate),
        "zero": ("a range of a file is zeroed", 300, _zero),
    }
    return [
        Kind(name=name, text=text, cases=cases, attempt=partial(_attempt, damage))
        for name, (text, cases, damage) in made.items()
    ]


def _flip(content: bytearray, draw: random.Random) -> bytearray:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def _truncate(content: bytearray, draw: random.Random) -> bytearray:
    return content[: draw.randrange(len(content))]


def _zero(content: bytearray, draw: random.Random) -> bytearray:
    first = draw.randrange(len(content))
    last = min(len(content), first + draw.choice((1, 16, 512, 4096)))
    content[first:last] = bytes(last - first)
    return content


def _attempt(
    damage: Callable[[bytearray, random.Random], bytearray], _number: int, draw: random.Random
) -> Outcome:
    folder = fresh("damage")
    run = Path(shutil.copytree(_stopped() if draw.random() < 0.4 else finished("memory"),
                               folder / "run"))  # fmt: skip
    path = _any_file(run, draw)
    path.write_bytes(damage(bytearray(path.read_bytes()), draw))
    name = str(path.relative_to(run))
    answer = in_child(partial(_use, run, path.name in LOGS), folder / "said")
    if not isinstance(answer, dict):
        return failed(f"{name}: {answer.story}")
    if answer["problem"]:
        return failed(f"{name}: {answer['problem']}")
    shutil.rmtree(folder)
    return refused(answer["refused"]) if answer["refused"] else same()


def _any_file(run: Path, draw: random.Random) -> Path:
    """Return a file that is not empty; each kind of file is as likely as another."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.stat().st_size:
            name = re.sub(r"-[0-9a-f]{16}|step-\d+", "", str(path.relative_to(run)))
            kinds.setdefault(name, []).append(path)
    return draw.choice(kinds[draw.choice(sorted(kinds))])


def _stopped() -> Path:
    """Return a run that was killed in the training of its target."""
    run = root() / "reference-stopped"
    if not (run / "run.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        operation = int(0.8 * about("memory")["operations"])
        start("memory", run, partial(kill_at, run, operation)).kill(60)
        assert list(run.glob("jobs/*/checkpoints/step-*"))
    return run


def _use(run: Path, is_log: bool) -> dict[str, Any]:
    """Look at a damaged run and go on with it; return what was refused and what went wrong."""
    reference = finished("memory")
    shown, refusals = [], []
    status = said_by(["status", str(run), "--json"])
    if status.code == 0:
        shown += json.loads(status.text)["nodes"]
    elif not status.refusal:
        return {"problem": f"status: {status.story}"}
    try:
        shown += read_state([run])["runs"][0]["nodes"].values()
    except RbdcError as error:
        refusals.append(error.problem)
    if wrong := _wrong_scores(shown, reference):
        return {"problem": f"a wrong score is shown: {wrong}"}
    ended = said_by(words("memory", run))
    if ended.code != 0 and not ended.refusal:
        return {"problem": f"train: {ended.story}"}
    if ended.code != 0 or _other(run, reference, is_log):  # or in a file that nothing needed again
        found = said_by(["doctor", str(run)])
        if not found.refusal:
            return {"problem": f"doctor finds nothing: {found.story} after {ended.story}"}
        refusals.append(ended.refusal or found.refusal)
        repaired = said_by(["doctor", str(run), "--repair"])
        ended = said_by(words("memory", run))
        if repaired.code != 0 or ended.code != 0:
            return {"problem": f"repair: {repaired.story}; then {ended.story}"}
    other = _other(run, reference, is_log)
    return {"problem": f"{other} differs" if other else "", "refused": "; ".join(refusals)}


def _other(run: Path, reference: Path, is_log: bool) -> str:
    """Return the first thing that is not as in the reference, beside the log that was damaged."""
    ours, theirs = bits(run), bits(reference)
    names = (n for n in {**theirs, **ours} if not (is_log and n.endswith(LOGS)))
    return next((name for name in names if ours.get(name) != theirs.get(name)), "")


def _wrong_scores(shown: list[dict[str, Any]], reference: Path) -> str:
    """Return a score of a finished job that is not the job's; empty if there is none."""
    right = json.loads((reference / "result.json").read_text())["nodes"]
    for node in shown:
        known = right.get(node["name"], {}).get("metrics", {})
        for name, value in node["metrics"].items():
            if node["state"] == "done" and value is not None and value != known.get(name, value):
                return f"{node['name']} {name} {value}, not {known[name]}"
    return ""
