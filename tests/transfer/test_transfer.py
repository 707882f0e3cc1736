"""Detectors trained by the loop that trains classifiers, from the command to the result."""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rbdc
from rbdc.cli import main
from rbdc.errors import Interrupted
from rbdc.jobs.layout import PREDICTIONS, SHEET, WEIGHTS
from rbdc.settings.detection import DetectionRecipe, read_detection_recipe
from rbdc.training import Trained, World, join_world
from rbdc.training.loop import Session
from rbdc.training.world import leave_world
from rbdc.transfer.batches import DetectionBatches, DetectionSamples, make_transform
from rbdc.transfer.coco import Splits, open_splits
from rbdc.transfer.detection import Detection, groups_of
from rbdc.transfer.folder import load_detector
from rbdc.transfer.jobs import DetectJob, find_backbone
from rbdc.transfer.prepare import Transfer, prepare_transfer
from rbdc.transfer.scores import score
from tests.runs.test_processes import finish, free_port
from tests.support import QUICK, forked, started
from tests.training.test_resume import assert_equal, stop_after
from tests.transfer.scenes import classifier, read_results, resnet, write_scenes

VOC = Path(__file__).parents[3] / "shared" / "data" / "voc2012-mini.tar"
TINY: dict[str, Any] = {
    "epochs": 3.0, "batch_size": 2, "min_size": 32, "max_size": 64, "channels": 8, "regions": 8,
    "proposals": 20, "warmup_steps": 1, "lr": 1e-3,
}  # fmt: skip


def recipe(**settings: Any) -> DetectionRecipe:
    return DetectionRecipe(**{**TINY, **settings})


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 and 200 real images."""
    if not VOC.exists():
        pytest.skip("no shared data here")
    folder = tmp_path_factory.mktemp("voc")
    with tarfile.open(VOC) as archive:
        archive.extractall(folder, filter="data")
    return folder / "voc2012-mini"


@pytest.fixture(scope="module")
def splits(scenes: Path) -> Splits:
    return open_splits(scenes)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("backbones")
    made = {"vit": classifier(), "resnet": resnet()}
    return {name: rbdc.export(model, root / name) for name, model in made.items()}


def work(backbones: dict[str, Path], splits: Splits, name: str, **settings: Any) -> Detection:
    backbone = find_backbone(str(backbones[name]))
    job = DetectJob(backbone=backbone, splits=splits, recipe=recipe(**settings), seed=7)
    return Detection(job, QUICK, World())


def trained(job: Detection, folder: Path, *stops: int) -> Trained:
    folder.mkdir()
    for stopped in stop_after(*stops):
        torch.rand(3)  # the state of the global generator must not matter
        try:
            with Session(job, folder, machine=QUICK, world=World()) as session:
                return session.run(stopped)
        except Interrupted:
            continue
    raise AssertionError("never finished")


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_stopped_anywhere_it_ends_with_the_same_bits(
    name: str, backbones: dict[str, Path], splits: Splits, tmp_path: Path
) -> None:
    settings = {"epochs": 4.0, "drop_path": 0.1, "model_ema": True, "model_ema_decay": 0.9}
    straight = trained(work(backbones, splits, name, **settings), tmp_path / "straight")
    stopped = trained(work(backbones, splits, name, **settings), tmp_path / "stopped", 1, 2)
    assert_equal(straight, stopped)
    assert straight.history[-1]["step"] == 4 and "ema_mask_map" in straight.history[-1]


def test_every_process_has_its_share_of_the_same_batches(splits: Splits) -> None:
    def batches(size: int, rank: int, micro: int) -> Iterator[list[Any]]:
        transform = make_transform(DetectionRecipe())
        samples = DetectionSamples(splits.train, splits.class_names, transform, seed=3)
        return DetectionBatches(
            samples=samples,
            batch_size=2,
            device=torch.device("cpu"),
            part=(size, rank),
            micro=micro,
        ).from_step(1, 4)

    whole = [batch[0] for batch in batches(1, 0, 1)]
    shares = zip(batches(2, 0, 1), batches(2, 1, 1), strict=True)
    accumulated = list(batches(1, 0, 2))
    for batch, both, parts in zip(whole, shares, accumulated, strict=True):
        for cut in ([share for [share] in both], parts):
            assert torch.cat([part.indices for part in cut]).equal(batch.indices)
            for image, part in zip(batch.images, cut, strict=True):
                assert image.equal(part.images[0])


def test_the_rate_of_a_layer_and_of_a_step(backbones: dict[str, Path], splits: Splits) -> None:
    job = work(backbones, splits, "vit", epochs=20.0, warmup_steps=4)
    state = job.state(fresh=True)
    scales = [group["lr_scale"] for group in state.optimizer.param_groups]
    assert min(scales) == pytest.approx(0.7**4) and max(scales) == 1.0  # three blocks, the stem
    rates = []
    for step in range(job.steps):
        state.schedule.step(step)
        rates.append(state.learning_rate)
    assert rates[0] == 0.0 and rates[2] == pytest.approx(5e-4) and max(rates) == rates[4]
    assert rates[4] == pytest.approx(1e-3) and rates[-1] < 2e-5
    assert rates[5:] == sorted(rates[5:], reverse=True)
    flat = work(backbones, splits, "resnet").state(fresh=True)
    assert {group["lr_scale"] for group in flat.optimizer.param_groups} == {1.0}
    detector: Any = flat.model
    decayed = groups_of(detector, recipe(layer_decay=0.5))
    assert min(group["lr_scale"] for group in decayed) == 0.5**5  # four stages, the stem


def prepared(backbones: dict[str, Path], splits: Splits, *names: str, **settings: Any) -> Any:
    found = [find_backbone(name.replace("vit", str(backbones["vit"]))) for name in names]
    return prepare_transfer(found, splits, recipe(**settings), seeds=2)


def test_backbones_are_named_briefly_where_that_tells_them_apart(
    backbones: dict[str, Path], splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(backbones["vit"].parent)
    for words, expected in (
        (["vit", "scratch:vit", "./resnet"], ["vit", "scratch:vit", "resnet"]),
        ([str(backbones["vit"]), f"scratch:{backbones['vit']}"], ["vit", "scratch:vit"]),
    ):
        both = prepare_transfer([find_backbone(word) for word in words], splits, recipe())
        assert [backbone.name for backbone in both.backbones] == expected


def test_two_backbones_side_by_side(
    backbones: dict[str, Path], splits: Splits, tmp_path: Path
) -> None:
    both: Transfer = prepared(backbones, splits, "vit", "scratch:vit", epochs=1.0)
    events: list[Any] = []
    result = started(both, tmp_path / "run", machine=QUICK, watch=events.append, jobs=1)
    first, second = result["rows"]
    assert first["sha256"] and not second["sha256"]
    assert [len(row["trained"]) for row in result["rows"]] == [2, 2]
    assert first["cost"] == second["cost"]
    of_rows = [[trained["seed"] for trained in row["trained"]] for row in result["rows"]]
    assert of_rows[0] == of_rows[1] and len(set(of_rows[0])) == 2  # the same for all
    for row in result["rows"]:
        for entry in row["trained"]:
            folder = tmp_path / "run" / entry["folder"]
            assert (folder / SHEET).stat().st_size > 1000
            again = score(splits.val.annotations, read_results(folder / PREDICTIONS))
            assert json.loads(json.dumps(again)) == entry["scores"]
            report = json.loads((folder / WEIGHTS).read_text())
            assert report["used"] and report["left"]
    # nothing is trained twice; another backbone may be added
    events.clear()
    more = replace(both, backbones=(*both.backbones, find_backbone(str(backbones["resnet"]))))
    started(more, tmp_path / "run", machine=QUICK, watch=events.append, jobs=1)
    kinds = [event.kind for event in events if event.kind != "progress"]
    assert kinds.count("found") == 4 and kinds.count("finished") == 2


def _rank(rank: int, port: int, prepared: Transfer, output: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    world = join_world()
    try:
        started(prepared, output, machine=QUICK, watch=lambda _event: None, jobs=1, world=world)
    finally:
        leave_world()


def test_two_processes_train_and_score_one_detector(
    backbones: dict[str, Path], splits: Splits, tmp_path: Path
) -> None:
    """Each sees its part of the batches and of the images to be scored; one writes."""
    alone = prepare_transfer([find_backbone(str(backbones["vit"]))], splits, recipe(epochs=2.0))
    port = free_port()
    ranks = [forked(_rank, rank, port, alone, tmp_path / "two") for rank in range(2)]
    assert finish(ranks) == [0, 0]
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    (entry,) = result["rows"][0]["trained"]
    found = read_results(tmp_path / "two" / entry["folder"] / PREDICTIONS)
    assert {box["image_id"] for box in found["boxes"]} == {p.id for p in splits.val.pictures}
    again = score(splits.val.annotations, found)
    assert json.loads(json.dumps(again)) == entry["scores"]


def test_a_saved_detector_is_the_one_that_was_trained(
    backbones: dict[str, Path], splits: Splits, tmp_path: Path
) -> None:
    job = work(backbones, splits, "vit", epochs=1.0)
    done = trained(job, tmp_path / "run")
    job.export(done.state.model, tmp_path / "detector")
    loaded, names = load_detector(tmp_path / "detector")
    assert names == splits.class_names
    # float64: the weights lie channels last or first, and rounding decides between near scores
    image = torch.rand(3, 40, 50, dtype=torch.float64)
    found: Any = done.state.model.eval().double()
    with torch.no_grad():
        outputs, others = found([image])[0], loaded.double()([image])[0]
    assert len(outputs["boxes"])
    torch.testing.assert_close(outputs, others)


def test_the_command(
    backbones: dict[str, Path], scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    machine = ["--device=cpu", "--threads=1", "--workers=0", "--no-tensorboard"]
    command = [
        "transfer", "--compare", str(backbones["vit"]), f"scratch:{backbones['vit']}",
        "--data", str(scenes), "--output", str(tmp_path / "run"), *options, *machine,
    ]  # fmt: skip
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert "M parameters" in capsys.readouterr().out
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "mAP" in printed and "mask" in printed and "report.html" in printed
    assert main([*command, "--json"]) == 0  # found done
    result = json.loads(capsys.readouterr().out)
    assert [row["backbone"] for row in result["rows"]] == ["vit", "scratch:vit"]
    assert main([*command, "--epochs=1"]) == 2
    assert "epochs was 3.0, now 1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "SCENES"], "no backbone"),
        (["--backbone", "VIT", "--compare", "VIT", "--data", "SCENES"], "both given"),
        (["--backbone", "VIT"], "not said in one way"),
        (["--backbone", "VIT", "--train-json", "x.json"], "not said in one way"),
        (["--backbone", "none", "--data", "SCENES"], "none does not exist"),
        (["--backbone", "VIT", "--data", "SCENES", "--recipe", "smal"], "no recipe is called"),
        (["--backbone", "VIT", "--data", "SCENES", "--batch-size", "64"], "3 training images"),
        (["--backbone", "VIT", "--data", "SCENES", "--batch-size", "3", "--grad-accum-steps", "2"],
         "equal micro-batches"),
        (["--backbone", "VIT", "--data", "SCENES", "--batch-size", "2", "--opt", "adamm"],
         "no optimizer called"),
        (["--backbone", "VIT", "--data", "SCENES", "--batch-size", "2", "--seeds", "0"],
         "expected 1 or more"),
        (["--compare", "VIT", "VIT", "--data", "SCENES", "--batch-size", "2"], "the same weights"),
    ],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_trained(
    words: list[str],
    expected: str,
    backbones: dict[str, Path],
    scenes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"SCENES": str(scenes), "VIT": str(backbones["vit"])}
    words = [places.get(word, word) for word in words]
    output = tmp_path / "run"
    assert main(["transfer", *words, "--output", str(output), "--device", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert expected in errors and len(errors.strip().splitlines()) == 2
    assert not output.exists()


def test_the_papers_recipe_is_the_default() -> None:
    assert read_detection_recipe("paper", {}) == DetectionRecipe()


def test_four_real_images_are_learned_by_heart(tmp_path: Path, voc: Path) -> None:
    content = json.loads((voc / "annotations" / "instances_train.json").read_text())
    objects = Counter(entry["image_id"] for entry in content["annotations"])
    chosen = [image for image in content["images"] if objects[image["id"]] in (1, 2, 3)][:4]
    ids = {image["id"] for image in chosen}
    few = [entry for entry in content["annotations"] if entry["image_id"] in ids]
    annotations = tmp_path / "four.json"
    annotations.write_text(json.dumps({**content, "images": chosen, "annotations": few}))
    model = rbdc.build("resnet18d", channels=[16, 32, 64, 128], stem_width=8, num_classes=10)
    job = DetectJob(
        backbone=find_backbone(str(rbdc.export(model, tmp_path / "model"))),
        splits=open_splits(annotations, voc / "train", annotations, voc / "train"),
        recipe=DetectionRecipe(
            epochs=80, batch_size=4, min_size=128, max_size=192, channels=32, regions=64,
            proposals=100, lr=3e-3, weight_decay=0.0, warmup_steps=20, frozen_norms=False, flip=0.0,
            eval_epochs=80,
        ),
        seed=0,
    )  # fmt: skip
    done = trained(Detection(job, QUICK, World()), tmp_path / "run")
    assert done.history[-1]["mask_map"] > 0.5 and done.history[-1]["box_map"] > 0.5
