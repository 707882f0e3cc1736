"""What the JSON files of a run's folder must hold to be used: the shapes that reading checks.

Entries that a shape does not name are kept as they are. `layout` lists the files.
"""

from pathlib import Path
from typing import Annotated, Literal, NotRequired, cast

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from rbdc.disk import SHAPE, Json, Number, read_json
from rbdc.errors import printable

Amount = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Shown = Annotated[str, AfterValidator(printable)]
Scores = dict[str, Number | None]
FewLevels = Annotated[int, Field(ge=0, le=1000)]


@with_config(SHAPE)
class Sample(TypedDict):
    """A text that a language model has continued."""

    prompt: str
    text: str


@with_config(SHAPE)
class JobResult(TypedDict, total=False):
    """result.json of a job."""

    kind: str
    metrics: Scores
    best: Scores | None
    images: Count
    decoded: Count
    seconds: Amount
    device_seconds: Amount
    cpu_seconds: Amount
    training_flops: Amount
    teacher_flops: Amount
    proof_error: Number | None
    norm_drift: Number | None
    scores: dict[str, dict[str, Number | Scores | None] | None]
    samples: list[Sample]


@with_config(SHAPE)
class TaskRecord(TypedDict, total=False):
    """What a training is told."""

    recipe: Json


@with_config(SHAPE)
class JobRecord(TypedDict, total=False):
    """job.json: the content that a job's key is the hash of."""

    task: TaskRecord
    fused_with: list[int]
    saved_for_growth: str
    backbone: dict[str, Json | list[Number] | str]


@with_config(SHAPE)
class Trial(TypedDict):
    """A row of a comparison."""

    protocol: str
    budget: Number
    seed: int
    lr: NotRequired[Number]
    score: Number | None
    flops: Amount
    epochs: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], list[Number]]
    data_passes: Number
    seconds: Number | None
    target: NotRequired[str]


@with_config(SHAPE)
class Detectors(TypedDict):
    """A row of a transfer."""

    backbone: str
    trained: NotRequired[list[JobResult]]


@with_config(SHAPE)
class Line(TypedDict):
    """A line of a comparison's table."""

    protocol: str
    budget: Number
    flops: Amount
    seeds: Count
    missing: Count
    unfinished: NotRequired[Count]
    scores: NotRequired[list[Number]]
    score: Number | None
    score_interval: Number | None
    gap: Number | None
    gap_interval: Number | None
    time: Number | None
    time_gap: Number | None
    time_gap_interval: Number | None
    relative_time: Number | None
    epochs: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], list[Number]]


@with_config(SHAPE)
class RunResult(TypedDict, total=False):
    """result.json of a run."""

    metric: str
    metrics: Scores | None
    best: Scores | None
    rows: list[Trial] | list[Detectors]
    lines: list[Line]
    nodes: dict[str, JobResult]
    standard: JobResult
    images: Count
    images_decoded: Count
    training_flops: Amount
    teacher_flops: Amount
    seconds: Amount | None
    relative_flops: Number | None
    relative_time: Number | None
    timm_loads: bool


@with_config(SHAPE)
class ProgressRecord(TypedDict):
    """progress.json of a job."""

    step: Count
    steps: Annotated[int, Field(ge=1)]
    images_per_second: NotRequired[Amount]
    seconds: NotRequired[Amount]
    waited: NotRequired[Number]
    workers: NotRequired[Count]
    scores: Scores | None


@with_config(SHAPE)
class Failed(TypedDict):
    """failed.json of a job."""

    error: Shown


@with_config(SHAPE)
class NodeRecord(TypedDict):
    """A job in run.json."""

    name: Shown
    kind: Shown
    level: FewLevels
    width: Number
    key: str
    folder: Annotated[str, Field(pattern=r"^jobs/\w[\w.+-]*$")]
    """A folder of the store, and no other."""
    parents: list[str]
    flops: Amount
    metrics: Annotated[list[str], Field(min_length=1)]
    blocks: NotRequired[Shown]
    image: NotRequired[list[Count]]
    sequence_length: NotRequired[Annotated[int, Field(ge=1)]]
    epochs: NotRequired[Number | None]
    seed: NotRequired[int]
    backbone: NotRequired[Shown]
    method: NotRequired[Json | None]


def _parents_first(nodes: list[NodeRecord]) -> list[NodeRecord]:
    later = {node["key"] for node in nodes}
    for node in nodes:
        if not later.isdisjoint(node["parents"]):
            raise ValueError(f"{node['name']} comes before its parents")
        later.discard(node["key"])
    return nodes


@with_config(SHAPE)
class Setting(TypedDict, total=False):
    """What all trials of a run have in common."""

    model: Json
    recipe: Json
    baseline_flops: Annotated[Number, Field(gt=0)]
    fused: dict[str, int] | None


@with_config(SHAPE)
class PlanRecord(TypedDict, total=False):
    """What a tree was planned to cost."""

    training_flops: Amount
    baseline_flops: Annotated[Number, Field(gt=0)]


@with_config(SHAPE)
class Identity(TypedDict, total=False):
    """What decides the result of a run."""

    setting: Setting
    plan: PlanRecord
    transfer: Json


@with_config(SHAPE)
class RunRecord(TypedDict):
    """run.json."""

    kind: Literal["train", "compare", "transfer"]
    nodes: Annotated[list[NodeRecord], AfterValidator(_parents_first)]
    identity: Identity
    request: NotRequired[Json]
    engine: NotRequired[Json]
    data: NotRequired[Json]
    machine: NotRequired[Json]
    environment: NotRequired[dict[str, str]]
    command: NotRequired[list[str]]
    started: NotRequired[str]


@with_config(SHAPE)
class BlocksLine(TypedDict):
    """A line of blocks.jsonl."""

    epoch: Number
    flops: Number
    blocks: dict[str, list[list[Number]]]


LogLine = dict[str, Number | None]
"""A line of log.jsonl."""


def read_job_result(path: Path) -> Json | None:
    """Return the content of a job's result.json, or None if there is none."""
    return cast(Json | None, read_json(path, JobResult))


def read_run_result(path: Path) -> Json | None:
    """Return the content of a run's result.json, or None if there is none."""
    return cast(Json | None, read_json(path, RunResult))
