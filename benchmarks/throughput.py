"""Compare the speed of our training loop with timm's at each level of a tree, and with itself.

    python benchmarks/throughput.py                  # images in memory: the embedded ones
    python benchmarks/throughput.py --cifar FOLDER   # and CIFAR-10 as FOLDER/train/CLASS/*.jpg
    python benchmarks/throughput.py --overhead demo  # where a run's time goes; or demo-deit

Ours is `rbdc.training.train_together` as a run calls it: its checks, logs and TensorBoard included.
timm's is the loop of its train.py from its parts, with its defaults: prefetcher, persistent
workers, FastCollateMixup, no fused optimizer, and not channels last (`--channels-last` asks it to).

Equal are the model with its weights, fp32, batch, workers, AdamW, its schedule, and augmentation:
- memory: pad by 2 and crop at random, flip. timm has no such crop, so that its data set, of PIL
  images, crops and flips with torchvision, in `--workers` processes. Ours needs none.
- folder: the recipe deit's (RandAugment, erasing, mixup, cutmix, smoothing; not its repeats, which
  timm has only for many processes) and resnet50d's (resized crop, flip, colour jitter), both with
  `--workers`. A run leaves workers a core each, timm trains with torch's threads, as many as there
  are cores; `--threads` gives both the same.

They take turns, for the target and for each narrow level of a tree of two steps. A turn starts
anew, and its first steps are not timed; the others are, data included, all in one epoch: what timm
loses between epochs is not counted. Printed are ratios of medians, with the least and the largest
of a turn: our speed over timm's; the time of a level's siblings on one stream of batches over their
time apart, each on a stream of its own; a level's speed over the target's, beside its FLOPs.

Expected: 1.5 of timm's speed in memory and 1.0 from folders, or more; at most 1.0 of the siblings'
time; what is neither step, batch nor evaluation, under 3 % of a run.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip

from rbdc.data import DataSet, ImageSet, TrainingBatches, open_data
from rbdc.errors import Interrupted
from rbdc.experiments.train import Training, prepare
from rbdc.jobs import grow, train
from rbdc.models import ModelSpec
from rbdc.plan import forward_flops
from rbdc.runs import run
from rbdc.settings import Machine, Recipe, read_recipe, split_settings
from rbdc.training import (
    Task,
    World,
    classification,
    fit_to_data,
    image_format,
    initial_weights,
    loop,
    session,
)
from rbdc.training.logs import Logs
from rbdc.training.machine import default_threads
from rbdc.training.state import State

RECIPES = {"deit": ("demo-deit", "deit"), "resnet": ("demo", "resnet50d")}  # memory, folder
LEVELS = {1.0: 1, 0.5: 2, 0.25: 4}  # widths, and how many models of each a tree of two steps has
EPOCHS = 8  # of the schedule; a turn ends long before
ALL_THREADS = torch.get_num_threads()
WARM = 8  # steps of a turn that are not timed: afterwards the workers' queues are as always


def make_task(family: str, width: float, data: DataSet, batch_size: int) -> Task:
    """The small model of the family's demo, with the recipe for this kind of data."""
    demo, large = (read_recipe(name) for name in RECIPES[family])
    given = {"opt": "adamw", "lr": 1e-3, "batch_size": batch_size, "aug_repeats": 0}
    _, recipe = split_settings(demo if data.in_memory else large, given)
    arguments = demo["model_kwargs"] | ({} if data.in_memory else {"img_size": 32})
    spec = ModelSpec(name=demo["model"], width=width, arguments=arguments)
    model = fit_to_data(spec, data, recipe)
    image = image_format(model, recipe, data)
    return Task(
        model=model, recipe=recipe, image=image, epochs=EPOCHS, seed=0, data_seed=0, warmup_epochs=1
    )


class PilImages(torch.utils.data.Dataset[tuple[Any, int]]):
    """Images in memory as a user of timm has them; create_loader sets `transform`."""

    transform: Callable[[Any], Any]

    def __init__(self, data: ImageSet, recipe: Recipe) -> None:
        self.images = [data.read(index) for index in range(len(data))]
        self.labels = data.labels.tolist()
        crop = RandomCrop(data.images.shape[-2:], padding=recipe.crop_padding)
        self.augment = Compose([crop, RandomHorizontalFlip(recipe.hflip)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.augment(self.images[index])), self.labels[index]


def timm_loader(task: Task, data: DataSet, images: Any, workers: int) -> Any:
    """As train.py makes it."""
    recipe, image = task.recipe, image_format(task.model, task.recipe, data)
    mix = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix, "prob": recipe.mixup_prob}
    mix |= {"switch_prob": recipe.mixup_switch_prob, "label_smoothing": recipe.smoothing}
    collate = FastCollateMixup(**mix, num_classes=len(data.class_names)) if recipe.mixes else None
    given: dict[str, Any] = {"mean": image.mean, "std": image.std, "no_aug": data.in_memory}
    given |= {"input_size": (image.channels, image.height, image.width), "collate_fn": collate}
    given |= {"scale": recipe.scale, "ratio": recipe.aspect_ratio, "hflip": recipe.hflip}
    given |= {"color_jitter": recipe.color_jitter or None, "auto_augment": recipe.aa}
    given |= {"re_prob": recipe.reprob, "re_mode": recipe.remode, "batch_size": recipe.batch_size}
    given |= {"interpolation": recipe.train_interpolation, "num_workers": workers}
    return create_loader(images, is_training=True, device=torch.device("cpu"), **given)


def timm_turn(task: Task, loader: Any, steps: int, channels_last: bool) -> float:
    """train.py's loop: the seconds of `steps` steps."""
    recipe, model = task.recipe, initial_weights(task).model.train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    optimizer = create_optimizer_v2(model, opt=recipe.opt, **settings)
    times: dict[str, Any] = {"warmup_lr": recipe.warmup_lr, "min_lr": recipe.min_lr}
    times |= {"num_epochs": EPOCHS, "warmup_epochs": 1, "updates_per_epoch": len(loader)}
    schedule, _ = create_scheduler_v2(optimizer, step_on_epochs=False, **times)
    loss_of = SoftTargetCrossEntropy() if recipe.mixes else torch.nn.CrossEntropyLoss()
    losses, done = AverageMeter(), []
    for update, (images, targets) in zip(range(WARM + steps), loader, strict=False):
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        loss = loss_of(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        schedule.step_update(num_updates=update + 1, metric=losses.avg)
        done.append(time.perf_counter())
    return done[-1] - done[WARM - 1]


def our_turn(task: Task, data: DataSet, steps: int, machine: Machine, models: int = 1) -> float:
    """Time `steps` steps of siblings in our loop, which is told to stop after them."""
    done: list[float] = []

    def stopped() -> bool:  # asked after every step, and by the thread that watches shared batches
        if threading.current_thread() is threading.main_thread():
            done.append(time.perf_counter())
        return len(done) == WARM + steps

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack, suppress(Interrupted):
        begun = []
        for seed in range(models):
            folder, own = Path(name) / str(seed), replace(task, seed=seed)
            folder.mkdir()
            problem = classification.Classification(
                own, data, partial(initial_weights, own), machine, World()
            )
            sibling = session.Session(problem, folder, machine=machine, world=World())
            begun.append(stack.enter_context(sibling))
        list(loop.train_together(begun, stopped))
    return done[-1] - done[WARM - 1]


def spread(ratios: list[float]) -> str:
    """The median, with the least and the largest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(
    case: str, family: str, width: float, data: DataSet, options: argparse.Namespace
) -> tuple[float, int]:
    """Print a level's ratios; return our images per second, and the FLOPs of an image."""
    task, models = make_task(family, width, data, options.batch_size), LEVELS[width]
    decoders = 0 if data.in_memory else options.workers
    threads = options.threads or default_threads(decoders)
    machine = Machine(device="cpu", threads=threads, workers=options.workers)
    if isinstance(data.train, ImageSet):
        images: Any = PilImages(data.train, task.recipe)
    else:
        images = create_dataset("", root=options.cifar, split="train", is_training=True)
    steps, seconds = options.steps, []
    assert WARM + steps < len(data.train) // options.batch_size, "a turn is less than an epoch"
    for _ in range(options.turns + 1):
        ours = our_turn(task, data, steps, machine)
        together = our_turn(task, data, steps, machine, models) if models > 1 else ours
        torch.set_num_threads(options.threads or ALL_THREADS)
        loader = timm_loader(task, data, images, options.workers)
        seconds.append((ours, together, timm_turn(task, loader, steps, options.channels_last)))
        del loader  # and with it its workers
    del seconds[0]  # it was to warm up
    beside_timm = spread([theirs / ours for ours, _, theirs in seconds])
    print(f"{case:>18}: {beside_timm} of timm's speed in {len(seconds)} turns", end="")
    if models > 1:
        shared = spread([together / (models * ours) for ours, together, _ in seconds])
        print(f"; {models} on one stream: {shared} of their time apart", end="")
    print(flush=True)
    speed = steps * options.batch_size / statistics.median(ours for ours, _, _ in seconds)
    return speed, forward_flops(task.model)


class Clock:
    """Where time goes: every moment belongs to the innermost part that runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.parts, self.last = ["the rest"], time.perf_counter()

    def tick(self) -> None:
        self.last, before = time.perf_counter(), self.last
        self.seconds[self.parts[-1]] += self.last - before

    def watch(self, part: str, owner: Any, name: str) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **given: self.run(part, call, *args, **given))

    def run(self, part: str, call: Callable[..., Any], *args: Any, **given: Any) -> Any:
        self.tick()
        self.parts.append(part)
        try:
            result = call(*args, **given)
        finally:
            self.tick()
            self.parts.pop()
        steps = isinstance(result, Generator)
        return iter(lambda: self.run(part, next, result, None), None) if steps else result


PARTS: list[tuple[str, Any, list[str]]] = [
    ("steps", State, ["update"]),
    ("batches", TrainingBatches, ["from_step"]),
    ("evaluation", classification, ["evaluate"]),
    ("evaluation", grow, ["evaluate"]),
    ("checkpoints", session, ["save_checkpoint"]),
    ("best models written", classification, ["export"]),
    ("results written", train, ["export", "write_state"]),
    ("logs and TensorBoard opened", Logs, ["__init__"]),
    ("logs and TensorBoard written", Logs, ["step", "epoch", "close"]),
    ("trainings set up", session.Session, ["__init__"]),
    ("trainings set up", classification.Classification, ["__init__"]),
    ("coupled and proved", grow.GrowJob, ["run"]),
    ("run checked, begun, finished", run, ["check", "_begin"]),
    ("run checked, begun, finished", Training, ["_result", "_finish"]),
]


def overhead(options: argparse.Namespace) -> None:
    """Run a recipe's whole tree, one model after the other; print where the time went."""
    prepared = prepare(*split_settings(read_recipe(options.overhead)))
    clock, machine = Clock(), Machine(device="cpu", threads=options.threads)
    for part, owner, names in PARTS:
        for name in names:
            clock.watch(part, owner, name)
    with tempfile.TemporaryDirectory() as folder:
        clock.last = time.perf_counter()
        run.start(prepared.run(), Path(folder) / "run", run.Where(machine=machine, jobs=1))
        clock.tick()
    whole = sum(clock.seconds.values())
    rest = 1 - sum(clock.seconds[part] for part in ("steps", "batches", "evaluation")) / whole
    print(f"{options.overhead}: {whole:.1f} s, {rest:.2%} neither step, batch nor evaluation")
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"{part:>30}: {seconds:7.2f} s {seconds / whole:7.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", help="CIFAR-10 as a folder of JPEG files")
    parser.add_argument("--only", default="", help="part of a case, such as 'memory deit'")
    numbers = {"turns": 7, "steps": 60, "batch-size": 128, "threads": 0, "workers": 2}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--channels-last", action="store_true", help="timm's model too")
    parser.add_argument("--overhead", metavar="RECIPE", help="demo, or a longer run")
    options = parser.parse_args()
    if options.overhead:
        overhead(options)
        return
    for data in map(open_data, filter(None, ["embedded", options.cifar])):
        kind = "memory" if data.in_memory else "folder"
        for family in RECIPES:
            found = {}
            for width in LEVELS:
                if options.only in (case := f"{kind} {family} {width:g}"):
                    found[width] = speed, flops = compare(case, family, width, data, options)
                    if width < 1 and 1.0 in found:
                        target_speed, target_flops = found[1.0]
                        print(
                            f"{'':>20}{speed / target_speed:.1f} times the target's speed; "
                            f"{target_flops / flops:.1f} times fewer FLOPs",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
