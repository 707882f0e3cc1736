"""What is run (`Run`) and where (`Where`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rbdc.arguments import check_fields
from rbdc.cluster.ray_engine import worker_facts
from rbdc.jobs.engine import Engine
from rbdc.jobs.job import Node
from rbdc.settings import Cluster, Machine
from rbdc.training import World
from rbdc.training.choices import MachineFacts, choose_machine
from rbdc.training.machine import read_facts

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run: jobs, how their result is made, and what is recorded of them."""

    kind: Literal["train", "compare", "transfer"]
    nodes: Sequence[Node]
    """The jobs, each once, parents first."""
    request: Mapping[str, Any]
    """The settings as they were asked for: what it takes to repeat the run."""
    identity: Mapping[str, Any]
    """What decides the result: it must be the same when a folder is used again."""
    data: Mapping[str, Any]
    """The data set, for people."""
    result: Callable[[Path], Result]
    """Make the result from the finished jobs in a folder; those not finished are missing."""
    finish: Callable[[Path, Result], None] = lambda _folder, _result: None
    """Write what the finished run leaves beside its result."""
    targets: frozenset[str] = frozenset()
    """Keys of jobs after each of which the result so far is written."""
    skips_failures: bool = False
    """Whether a training that fails is left out of the result, instead of failing the run."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where jobs run: on which machine or cluster, how many at a time, by which processes."""

    machine: Machine = field(default_factory=Machine)
    cluster: Cluster = field(default_factory=Cluster)
    jobs: int | None = None
    """Trainings side by side on this machine; None: 1 on a GPU, on a CPU what is faster."""
    world: World = field(default_factory=World)
    """The processes that train each model together."""
    node: str | None = None
    """Train only the model of this name, in this process; its parents must be trained."""
    engine: Engine | None = None
    """Another engine than this machine's or the cluster's."""
    facts: MachineFacts | None = None
    """The device that jobs run on and its machine, once `settle` has chosen for it."""

    def __post_init__(self) -> None:
        check_fields(self)


def settle(where: Where) -> Where:
    """Choose what is automatic for the device of the jobs, which may be a cluster's."""
    if where.facts is not None:
        return where
    facts = where.world.broadcast(lambda: _facts(where))
    return replace(where, facts=facts, machine=choose_machine(where.machine, facts))


def _facts(where: Where) -> MachineFacts:
    device = where.machine.device
    if where.cluster.engine == "ray" and where.cluster.address and device != "cpu":
        return worker_facts(where.cluster, device)
    facts = read_facts(device)
    # unless torchrun has started them, there is at most one training per GPU at a time
    at_once = where.jobs or (max(1, facts.gpus) if where.world.size == 1 else 1)
    return replace(facts, processes=facts.processes * at_once)
