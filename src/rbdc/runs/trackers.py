"""Log a run's trainings to experiment trackers: Weights & Biases, trackio, MLflow.

A tracker gets one run per model, named by its node ("target", "standard", "1.0") and grouped by the
tree, which is the run's folder. It sees what the engine reports to the process that started the
run, so it works for every engine. Its own failures are told once and end it, never a training.
TensorBoard needs no adapter: trainings write its files themselves.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rbdc.errors import RunError
from rbdc.jobs.engine import Event, Watcher
from rbdc.jobs.job import Node
from rbdc.runs.request import Run

PROJECT = "rbdc"
PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Package of each tracker; the extra of rbdc has the tracker's name."""


class Logged(Protocol):
    """One model's run in a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step of the training."""

    def finish(self, ok: bool) -> None:
        """End the run: the model is trained, or its training failed."""


class _Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in local files."""

    def __init__(self, tree: str, node: Node, config: Mapping[str, Any], folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run = wandb.init(
            project=PROJECT,
            group=tree,
            name=node.name,
            id=f"{tree}-{node.job.key[:16]}",
            resume="allow",
            config=dict(config),
            dir=str(folder),
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)


class _Trackio:
    """A run of trackio, in its local store (TRACKIO_DIR)."""

    def __init__(self, tree: str, node: Node, config: Mapping[str, Any], folder: Path) -> None:
        del folder
        trackio: Any = importlib.import_module("trackio")
        self.run = trackio.init(
            project=PROJECT,
            group=tree,
            name=f"{tree} {node.name}",  # it finds runs again by their names
            resume="allow",
            config=dict(config),
            embed=False,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, ok: bool) -> None:
        del ok  # it knows no failed runs
        self.run.finish()


class _Mlflow:
    """A run of MLflow; MLFLOW_TRACKING_URI says where its store is."""

    def __init__(self, tree: str, node: Node, config: Mapping[str, Any], folder: Path) -> None:
        del folder
        mlflow: Any = importlib.import_module("mlflow")
        self.client = mlflow.MlflowClient()
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self.client.create_experiment(PROJECT)
        tags = {"rbdc.tree": tree, "rbdc.key": node.job.key}
        same = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found = self.client.search_runs([experiment], same)
        run = (
            found[0] if found else self.client.create_run(experiment, run_name=node.name, tags=tags)
        )
        self.id = run.info.run_id
        if not found:
            for name, value in config.items():
                self.client.log_param(self.id, name, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def finish(self, ok: bool) -> None:
        self.client.set_terminated(self.id, status="FINISHED" if ok else "FAILED")


Open = Callable[[str, Node, Mapping[str, Any], Path], Logged]
TRACKERS: dict[str, Open] = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed."""
    for name in names:
        package = PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise RunError(
                f"--log {name} needs the package {package}, which is not installed",
                f"pip install 'rbdc[{name}]', or leave it out.",
            )


def with_trackers(names: Sequence[str], run: Run, output: Path, watch: Watcher) -> Watcher:
    """Return a watcher that also logs to these trackers."""
    trackers = [_Tracker(name, run, output) for name in names if name in TRACKERS]
    if not trackers:
        return watch

    def watched(event: Event) -> None:
        watch(event)
        for tracker in trackers:
            tracker(event)

    return watched


class _Tracker:
    """Passes events on to one tracker until it fails."""

    def __init__(self, name: str, run: Run, output: Path) -> None:
        self.name, self.output, self.tree = name, output, output.resolve().name
        self.nodes = {node.job.key: node for node in run.nodes if node.job.trains}
        self.open: dict[str, Logged] = {}
        self.works = True

    def __call__(self, event: Event) -> None:
        if not self.works or event.key not in self.nodes:
            return
        try:
            self._pass_on(event)
        except Exception as error:  # a library with a network behind it can raise anything
            self.works = False
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(
                f"{self.name} failed and is left out from here on: {reason}", stacklevel=2
            )

    def _pass_on(self, event: Event) -> None:
        node = self.nodes[event.key]
        if event.kind == "started":
            self.open[event.key] = TRACKERS[self.name](self.tree, node, _config(node), self.output)
        elif event.key not in self.open:
            return
        elif event.kind == "progress" and event.progress is not None:
            p = event.progress
            values = {
                "train/loss": p.loss,
                "train/lr": p.lr,
                "train/images_per_second": p.images_per_second,
                "flops": node.job.total_flops - node.job.flops * (1 - p.step / p.steps),
                "epoch": p.epochs * p.step / p.steps,
            }
            scores = {f"eval/{name}": value for name, value in (p.scores or {}).items()}
            self.open[event.key].log({**values, **scores}, p.step)
        elif event.kind in ("finished", "failed"):
            self.open.pop(event.key).finish(event.kind == "finished")


def _config(node: Node) -> dict[str, Any]:
    """Return what a tracker is told of a model, as plain values."""
    known = {**node.job.describe(), "level": node.level, "flops": node.job.flops}
    return {k: v for k, v in known.items() if isinstance(v, str | int | float)}
