"""The tree of a plan: which jobs there are, and each one's place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rbdc.coupling import OffDiagonal
from rbdc.data import DataSet, derive_seed
from rbdc.jobs.coupling import Coupling, TransitionName, transitions
from rbdc.jobs.job import GrowJob, Job, TrainJob
from rbdc.plan import Plan
from rbdc.settings import Recipe
from rbdc.training import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A job's place in the tree."""

    name: str
    level: int
    """0 is the target's."""
    job: Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """All jobs of a run, parents before children, the target last but for standard training."""

    plan: Plan
    nodes: tuple[Node, ...]
    baseline: Node | None = None

    @property
    def target(self) -> Node:
        return self.nodes[-1]

    @property
    def all(self) -> tuple[Node, ...]:
        return (*self.nodes, *([self.baseline] if self.baseline else []))


def grow_tree(
    plan: Plan,
    recipe: Recipe,
    data: DataSet,
    *,
    seed: int = 0,
    transition: tuple[TransitionName, ...] = ("restart",),
    carry_warmup_epochs: float = 1.0,
    narrow_lr: float = 1.0,
    with_baseline: bool = False,
    teacher: str | None = None,
    allow_inexact: bool = False,
    off_diagonal: OffDiagonal = "zero",
) -> Tree:
    """The jobs of a plan: 2^S leaves from distinct seeds, couplings, trainings, the target.

    A seed follows from the place in the tree, so siblings always differ and a run can be repeated.
    `narrow_lr` is the learning rate of a level over that of the next wider one.
    """
    steps = [
        Coupling(transition=name, off_diagonal=off_diagonal, allow_inexact=allow_inexact)
        for name in (transitions(transition, plan.steps) if plan.steps else ())
    ]
    nodes: list[Node] = []
    below: list[TrainJob] = []
    for stage in plan.stages:  # leaves first
        into = steps[plan.steps - stage.level - 1] if stage.level < plan.steps else None
        out_of = steps[plan.steps - stage.level] if stage.level else None
        rate = recipe.learning_rate * narrow_lr**stage.level
        own = replace(recipe, lr=rate) if rate != recipe.learning_rate else recipe
        here: list[TrainJob] = []
        for index in range(stage.models):
            name = f"{stage.level}.{index}" if stage.level else "target"
            initial = None
            if into is not None:
                initial = GrowJob(
                    model=plan.spec(stage),
                    parents=(below[2 * index], below[2 * index + 1]),
                    method=into,
                    seed=derive_seed(seed, "coupling", stage.level, index),
                )
                nodes.append(Node(name=f"coupling {name}", level=stage.level, job=initial))
            job = TrainJob(
                task=Task(
                    model=plan.spec(stage),
                    recipe=own,
                    epochs=stage.epochs,
                    seed=derive_seed(seed, "node", stage.level, index),
                    warmup_epochs=(
                        into.warmup_epochs(recipe, carry_warmup_epochs)
                        if into
                        else recipe.warmup_epochs
                    ),
                    anneal=out_of is None or not out_of.carries,
                ),
                data=data.fingerprint,
                class_names=data.class_names,
                initial=initial,
                teacher=teacher,
                keeps=out_of.keeps if out_of else "",
            )
            here.append(job)
            nodes.append(Node(name=name, level=stage.level, job=job))
        below = here
    baseline = _standard(plan, recipe, data, seed, teacher) if with_baseline else None
    return Tree(plan=plan, nodes=tuple(_by_level(nodes)), baseline=baseline)


def _by_level(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node.level, isinstance(node.job, TrainJob)))


def _standard(plan: Plan, recipe: Recipe, data: DataSet, seed: int, teacher: str | None) -> Node:
    """Standard training of the target for exactly the FLOPs of the whole tree."""
    epochs = plan.training_flops / (plan.target.training_flops / plan.target.epochs)
    job = TrainJob(
        task=Task(
            model=plan.spec(plan.target),
            recipe=recipe,
            epochs=epochs,
            seed=derive_seed(seed, "node", 0, 0),
            warmup_epochs=recipe.warmup_epochs,
        ),
        data=data.fingerprint,
        class_names=data.class_names,
        teacher=teacher,
    )
    return Node(name="standard", level=0, job=job)
