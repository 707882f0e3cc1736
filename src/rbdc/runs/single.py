"""One model of a run by itself, for a scheduler that starts each training on its own.

Several such processes may be at work in one folder, each on its own model; a whole run is not begun
beside them, nor they beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from rbdc.errors import RunError, nearest
from rbdc.settings import Cluster
from rbdc.training.machine import default_threads
from rbdc.jobs.engine import InProcess, Watcher
from rbdc.jobs.execute import Workshop
from rbdc.jobs.job import Job
from rbdc.jobs.lock import locked
from rbdc.jobs.tree import Node
from rbdc.runs.run import begin_run, check_run

Result = TypeVar("Result")


def run_one(
    name: str,
    nodes: Sequence[Node],
    shop: Workshop,
    output: Path,
    *,
    request: Mapping[str, Any],
    watch: Watcher,
    finish: Callable[[], Result],
) -> Result | None:
    """Train the node called `name`, its parents being trained; `finish` if it was the last one."""
    jobs = _to_do(name, nodes, shop)
    check_run(nodes, shop, output)
    world, store = shop.world, shop.store
    with ExitStack() as stack:

        def begin() -> None:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(output, shared=True))
            stack.enter_context(locked(store.begin(jobs[-1])))
            begin_run(output, nodes, request, shop, jobs=1, cluster=Cluster())

        world.broadcast(begin)
        threads = shop.machine.threads or default_threads(shop.decoders(jobs))
        InProcess(threads=dict.fromkeys((job.key for job in jobs), threads)).run(jobs, shop, watch)
        return world.broadcast(
            lambda: finish() if all(store.result(node.job) for node in nodes) else None
        )


def _to_do(name: str, nodes: Sequence[Node], shop: Workshop) -> list[Job]:
    """The node's job; before it the coupling that makes its start, and what that is made of."""
    trainings = {node.name: node.job for node in nodes if node.job.trains}
    if name not in trainings:
        raise RunError(
            f"the tree has no model called {name!r}",
            nearest(name, trainings) or f"Its models are {', '.join(trainings)}.",
        )
    job = trainings[name]
    names = {other.key: known for known, other in trainings.items()}
    parents = [parent for start in job.parents for parent in start.parents]
    missing = [names[parent.key] for parent in parents if not shop.store.result(parent)]
    if missing:
        raise RunError(
            f"{name} is coupled of models that are not trained yet: {', '.join(missing)}",
            "Train these first.",
        )
    return [*parents, *job.parents, job]
