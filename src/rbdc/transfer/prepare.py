"""From backbones and data to detectors side by side, and to their result."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from rbdc.data import derive_seed
from rbdc.disk import write_json
from rbdc.errors import RunError
from rbdc.jobs.engine import Engine, Watcher
from rbdc.jobs.layout import JOBS, RESULT
from rbdc.jobs.store import Store, folder_name
from rbdc.jobs.tree import Node
from rbdc.runs.run import check_run, run_nodes
from rbdc.settings import Cluster, Machine
from rbdc.settings.detection import DetectionRecipe
from rbdc.training import World
from rbdc.transfer.coco import open_coco, read_coco
from rbdc.transfer.detection import Splits
from rbdc.transfer.jobs import SCRATCH, Backbone, DetectJob
from rbdc.transfer.workshop import DetectionWorkshop


def open_splits(data: str | Path, *others: str | Path) -> Splits:
    """A folder in COCO's layout; or the training images' JSON and folder, then validation's."""
    if not others:
        train, val = open_coco(data)
        return Splits(train=train, val=val)
    images, val_annotations, val_images = others
    return Splits(train=read_coco(data, images), val=read_coco(val_annotations, val_images))


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTransfer:
    """Detectors that are ready to be trained, each backbone's from the same seeds."""

    backbones: tuple[Backbone, ...]
    recipe: DetectionRecipe
    splits: Splits
    seeds: tuple[int, ...]

    def nodes(self) -> list[Node]:
        """Seed by seed, so that all backbones can be compared as soon as one is through."""
        alone = len(self.seeds) == 1
        return [
            Node(
                name=backbone.name if alone else f"{backbone.name}, seed {number}",
                level=0,
                job=DetectJob(
                    backbone=backbone,
                    recipe=self.recipe,
                    seed=derive_seed(seed, "detector"),
                    data=self.splits.fingerprints,
                    class_names=self.splits.class_names,
                ),
            )
            for number, seed in enumerate(self.seeds)
            for backbone in self.backbones
        ]

    def check(
        self,
        output: Path,
        *,
        machine: Machine,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        world: World | None = None,
    ) -> None:
        """Refuse what cannot work; `run` does this first. Nothing is written."""
        check_run(self.nodes(), self.shop(output, machine, world), output, jobs, cluster)

    def run(
        self,
        output: Path,
        *,
        machine: Machine,
        watch: Watcher,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        engine: Engine | None = None,
        world: World | None = None,
    ) -> dict[str, Any]:
        """Train what is not trained yet in `output`; the result of all."""
        shop = self.shop(output, machine, world)
        return run_nodes(
            self.nodes(),
            shop,
            output,
            request=self.record(),
            watch=watch,
            finish=lambda: self._finish(output, shop),
            jobs=jobs,
            cluster=cluster,
            engine=engine,
        )

    def shop(self, output: Path, machine: Machine, world: World | None) -> DetectionWorkshop:
        return DetectionWorkshop(
            store=Store(output / JOBS),
            machine=machine,
            world=world or World(),
            splits=self.splits,
        )

    def record(self) -> dict[str, Any]:
        """What must be equal when a folder is used again; backbones and seeds may be added."""
        data = {
            name: {key: value for key, value in split.items() if key != "annotations"}
            for name, split in self.splits.to_json().items()
        }
        content = {"transfer": {"recipe": self.recipe.to_json(), "data_set": data}}
        return dict(json.loads(json.dumps(content)))

    def _finish(self, output: Path, shop: DetectionWorkshop) -> dict[str, Any]:
        result = self.result(shop)
        write_json(output / RESULT, result)
        return result

    def result(self, shop: DetectionWorkshop) -> dict[str, Any]:
        """Each backbone's detectors; what is not finished is not there."""
        rows: dict[str, dict[str, Any]] = {}
        for node in self.nodes():
            job = node.job
            assert isinstance(job, DetectJob)
            backbone = job.backbone
            row = rows.setdefault(
                backbone.name,
                {
                    "backbone": backbone.name,
                    "model": backbone.spec.to_json(),
                    "sha256": backbone.sha256,
                    "cost": shop.cost(job).to_json(),
                    "trained": [],
                },
            )
            if found := shop.store.result(job):
                row["trained"].append({**found, "folder": f"{JOBS}/{folder_name(job)}"})
        return {"kind": "transfer", "rows": list(rows.values()), "seeds": list(self.seeds)}


def _briefly_named(backbones: Sequence[Backbone]) -> tuple[Backbone, ...]:
    """By the ends of their paths, where these differ."""
    ends = [
        (SCRATCH if not backbone.sha256 else "")
        + PurePath(backbone.name.removeprefix(SCRATCH)).name
        for backbone in backbones
    ]
    if len(set(ends)) < len(ends):
        return tuple(backbones)
    return tuple(replace(b, name=end) for b, end in zip(backbones, ends, strict=True))


def prepare_transfer(
    backbones: Sequence[Backbone],
    splits: Splits,
    recipe: DetectionRecipe,
    *,
    seed: int = 0,
    seeds: int = 1,
) -> PreparedTransfer:
    """Detectors for each backbone, from `seeds` seeds each."""
    if seeds < 1:
        raise RunError(f"seeds is {seeds}, expected 1 or more", "1 trains a backbone once.")
    same = Counter((backbone.sha256, backbone.spec) for backbone in backbones)
    for backbone in backbones:
        if same[backbone.sha256, backbone.spec] > 1:
            raise RunError(
                f"{backbone.name} and another backbone have the same weights",
                "Name each once; --seeds repeats a training.",
            )
    return PreparedTransfer(
        backbones=_briefly_named(backbones),
        recipe=recipe,
        splits=splits,
        seeds=tuple(range(seed, seed + seeds)),
    )
