"""Show the progress of a run: bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from rbdc.jobs.engine import Event
from rbdc.jobs.job import Node, TrainingJob
from rbdc.metrics import final_scores, find_metric
from rbdc.report.units import loader_note, readable_duration, speed_text

TRUSTED = 0.05  # share of a run from which its own speed says more than a short measurement


class LiveRun:
    """Receives the events of an engine, and prints them."""

    def __init__(self, nodes: Sequence[Node], console: Console | None = None) -> None:
        self.console = console or Console()
        self.expect(nodes)
        self.done: dict[str, float] = {}  # share of each training
        self.began: float | None = None  # time of the first progress event
        self.found = 0.0  # FLOPs of jobs that were finished before this session
        self.bars: dict[str, TaskID] = {}
        self.warned: set[int] = set()  # levels whose images come too slowly
        self.rich = self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[what]}"),
            console=self.console,
            transient=True,
            expand=True,
            disable=not self.rich,
        )

    def expect(self, nodes: Sequence[Node]) -> None:
        """Set the jobs that events will be about."""
        self.nodes = {node.job.key: node for node in nodes}
        # what a training is of the whole: its FLOPs, until the engine expects seconds
        self.work = {node.job.key: node.job.flops for node in nodes if node.job.trains}
        self.expects_seconds = False

    def __enter__(self) -> Self:
        self.progress.start()
        self.whole = self.progress.add_task("tree", total=1.0, what="")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        """Print one event, and move the bars."""
        if event.kind == "note":
            self.say(event.note)
            return
        node, name = self.nodes[event.key], self.named(event.key)
        if event.kind == "found" and event.key in self.work:
            self.done[event.key] = 1.0
            self.found += self.work[event.key]
            scores = _scores(node, (event.result or {}).get("metrics", {}))
            self.say(f"{name}: already trained, {scores}")
        elif event.kind == "expected":
            if not self.expects_seconds:  # FLOPs and seconds do not add up
                self.work = dict.fromkeys(self.work, 0.0)
            self.work[event.key], self.expects_seconds = event.seconds, True
        elif event.kind == "started" and event.key in self.work:
            self.bars[event.key] = self.progress.add_task(name, total=1.0, what="")
            if event.devices:
                self.say(f"{name}: begins on {event.devices}")
        elif event.kind == "progress":
            self._progress(event, node, name)
        elif event.kind == "finished":
            self.done[event.key] = 1.0
            if event.key in self.bars:
                self.progress.remove_task(self.bars.pop(event.key))
            self.say(f"{name}: {_outcome(node, event.result or {})}")
        elif event.kind == "failed":
            self.say(f"{name}: failed: {event.error.splitlines()[0]}")
        self.progress.update(self.whole, completed=self.share(), what=f"left {self.left()}")

    def named(self, key: str) -> str:
        """Return the name of a job, with its size if it has one."""
        node = self.nodes[key]
        return f"{node.name} ({node.job.size})" if node.job.size else node.name

    def share(self) -> float:
        """Return the share of the run that is done."""
        return self._spent() / sum(self.work.values())

    def _progress(self, event: Event, node: Node, name: str) -> None:
        p = event.progress
        assert p is not None
        self.began = self.began or time.monotonic()
        share = p.step / p.steps
        self.done[event.key] = share
        epoch = min(p.epoch + 1, p.epochs)  # a training may end in the middle of an epoch
        what = f"epoch {epoch:.4g}/{p.epochs:.4g}  loss {p.loss:.3f}  "
        length = node.job.sequence_length if isinstance(node.job, TrainingJob) else None
        what += speed_text(p.images_per_second, length)
        images_left = (p.steps - p.step) * p.batch_size
        left = readable_duration(images_left / max(p.images_per_second, 1e-9))
        self.tell(event.key, what, left)
        note = "" if length else loader_note(asdict(p))  # nothing decodes text
        if note and node.level not in self.warned:
            self.warned.add(node.level)
            self.say(f"{name}: {note}")
        if p.scores is not None and not self.rich:
            scores = _scores(node, p.scores)
            self.say(f"Train {name}: {what}  lr {p.lr:.2e}  {scores}  left {self.left()}")

    def tell(self, key: str, what: str, left: str) -> None:
        """Show how far one training is."""
        if self.rich:
            share = self.done[key]
            self.progress.update(self.bars[key], completed=share, what=f"{what}  left {left}")

    def _spent(self) -> float:
        return sum(self.work.get(key, 0.0) * share for key, share in self.done.items())

    def left(self) -> str:
        """Return the time to the end: what is expected, then as this session has been so far."""
        whole, spent = sum(self.work.values()), self._spent()
        here, elapsed = spent - self.found, time.monotonic() - (self.began or time.monotonic())
        if self.expects_seconds and here < TRUSTED * whole:
            return readable_duration(whole - spent)
        if here <= 0 or elapsed <= 0:
            return "?"
        return readable_duration((whole - spent) / here * elapsed)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), highlight=False, soft_wrap=True)


def _scores(node: Node, scores: Mapping[str, Any]) -> str:
    shown = final_scores(scores, node.job.metrics).items()
    metrics = [(find_metric(name), value) for name, value in shown]
    return ", ".join(f"{metric.label} {metric.text(value)}" for metric, value in metrics)


def _outcome(node: Node, result: Mapping[str, Any]) -> str:
    scores = _scores(node, result.get("metrics", {}))
    if result.get("kind") != "grow":
        return f"{scores} after {readable_duration(result['seconds'])}"
    drift, proof = result.get("norm_drift"), ""
    if "proof_error" in result:
        drifts = f", drift of the norms {drift:.0e}" if drift is not None else ""
        proof = f" (proof {result['proof_error']:.0e}{drifts})"
    return f"{scores} before any step{proof}"
