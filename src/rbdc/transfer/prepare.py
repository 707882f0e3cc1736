"""From backbones and data to detectors side by side, and to their result."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rbdc.data import derive_seed
from rbdc.errors import RunError
from rbdc.jobs.job import Node
from rbdc.jobs.layout import JOBS
from rbdc.jobs.store import Store, folder_name
from rbdc.runs.run import Result, Run
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.coco import Splits
from rbdc.transfer.jobs import SCRATCH, Backbone, DetectJob


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Detectors that are ready to be trained, each backbone's from the same seeds."""

    backbones: tuple[Backbone, ...]
    recipe: DetectionRecipe
    splits: Splits
    seeds: tuple[int, ...]
    request: Mapping[str, Any] = field(default_factory=dict)
    """The settings as they were asked for."""

    @cached_property
    def jobs(self) -> dict[str, DetectJob]:
        """Jobs by name, seed by seed, so that all backbones can be compared after each."""
        alone = len(self.seeds) == 1
        return {
            backbone.name if alone else f"{backbone.name}, seed {number}": DetectJob(
                backbone=backbone,
                recipe=self.recipe,
                seed=derive_seed(seed, "detector"),
                splits=self.splits,
            )
            for number, seed in enumerate(self.seeds)
            for backbone in self.backbones
        }

    def run(self) -> Run:
        """Return what is run. Backbones and seeds may be added to a folder later."""
        splits = self.splits.to_json()
        data = {
            name: {key: value for key, value in split.items() if key != "annotations"}
            for name, split in splits.items()
        }
        return Run(
            kind="transfer",
            nodes=[Node(name=name, level=0, job=job) for name, job in self.jobs.items()],
            request=self.request,
            identity={"transfer": {"recipe": self.recipe.to_json(), "data_set": data}},
            data=splits,
            result=self._result,
        )

    def _result(self, output: Path) -> Result:
        """Return each backbone's detectors; those not finished are missing."""
        store = Store(output / JOBS)
        rows = []
        for backbone in self.backbones:
            jobs = [job for job in self.jobs.values() if job.backbone == backbone]
            trained = [
                {**found, "folder": f"{JOBS}/{folder_name(job)}"}
                for job in jobs
                if (found := store.result(job))
            ]
            row = {
                "backbone": backbone.name,
                "model": backbone.spec.to_json(),
                "sha256": backbone.sha256,
                "cost": asdict(jobs[0].cost),
                "trained": trained,
            }
            rows.append(row)
        return {"kind": "transfer", "rows": rows, "seeds": list(self.seeds)}


def prepare_transfer(
    backbones: Sequence[Backbone],
    splits: Splits,
    recipe: DetectionRecipe,
    *,
    seed: int = 0,
    seeds: int = 1,
    request: Mapping[str, Any] | None = None,
) -> Transfer:
    """Prepare detectors for each backbone, from `seeds` seeds each.

    Backbones are named by the ends of their paths, if these differ.
    """
    if seeds < 1:
        raise RunError(f"seeds is {seeds}, expected 1 or more", "1 trains a backbone once.")
    same = Counter((backbone.sha256, backbone.spec) for backbone in backbones)
    for backbone in backbones:
        if same[backbone.sha256, backbone.spec] > 1:
            raise RunError(
                f"{backbone.name} and another backbone have the same weights",
                "Name each once; --seeds repeats a training.",
            )
    ends = {
        ("" if b.sha256 else SCRATCH) + Path(b.name.removeprefix(SCRATCH)).name: b
        for b in backbones
    }
    if len(ends) == len(backbones):
        backbones = [replace(backbone, name=end) for end, backbone in ends.items()]
    return Transfer(
        backbones=tuple(backbones),
        recipe=recipe,
        splits=splits,
        seeds=tuple(range(seed, seed + seeds)),
        request=request or {},
    )
