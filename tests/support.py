"""What several tests need: small models with telling weights."""

import fcntl
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

import rbdc
from rbdc.cli import main
from rbdc.data import DataSet, ImageSet, TextData, embedded, memory_data, open_data
from rbdc.data.text import text_data
from rbdc.data.text_sources import embedded_text
from rbdc.data.tokenizer import find_tokenizer
from rbdc.disk import write_json
from rbdc.jobs.engine import Watcher
from rbdc.models.language import NAMES
from rbdc.runs.run import Run, Where, start
from rbdc.settings import Machine, Recipe
from rbdc.training import Session, Start, Task, Trained, World, fit_to_data, input_format
from rbdc.training import train as run_session
from rbdc.training.problems import make_problem

SMALL_VIT: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_classes": 5,
}
SMALL_RESNET: dict[str, Any] = {
    "img_size": 32,
    "channels": [8, 16, 16, 32],
    "stem_width": 4,
    "num_classes": 5,
}
SMALL: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": SMALL_VIT,
    "deit_tiny_distilled_patch16_224": SMALL_VIT,
    "deit3_large_patch16_224": SMALL_VIT,
    "resnet18": {"img_size": 32, "channels": [8, 16, 16, 32], "num_classes": 5},
    "resnet18d": SMALL_RESNET,
    "resnet50d": SMALL_RESNET,
}


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """Every tensor random and none small, so that nothing wrong hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.fill_(seed)
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            elif tensor.ndim == 1:
                tensor.copy_(0.3 * noise + (0.0 if "bias" in name or "mean" in name else 1.0))
            elif tensor.ndim == 3:  # tokens, position embedding
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * 1.5 / tensor[0].numel() ** 0.5)
    return model


def parents(name: str, width: float = 0.5, **arguments: Any) -> tuple[Any, Any]:
    first, second = (
        randomized(rbdc.build(name, width, **(arguments or SMALL[name])), seed) for seed in (1, 2)
    )
    return first, second


def images(model: Any, count: int = 3) -> Tensor:
    size = model.pretrained_cfg["input_size"]
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(7))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(x)
    return result


def small_data(train: int = 40, test: int = 20) -> DataSet:
    """The first embedded images: real ones, in memory."""
    return memory_data(
        "small",
        *(
            ImageSet(
                images=split.images[:count].clone(),
                labels=split.labels[:count].clone(),
                class_names=split.class_names,
            )
            for split, count in ((embedded("train"), train), (embedded("test"), test))
        ),
    )


def small_text() -> TextData:
    """Forty training sequences of the embedded text, by characters, and a few to test on."""
    text = embedded_text()[:1000]
    tokenizer = find_tokenizer("characters", text)
    parts = tokenizer.encode(text[:645]), tokenizer.encode(text[645:])
    return text_data(
        "text", *parts, length=16, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer,
        test_bytes=355,
    )  # fmt: skip


def data_for(name: str) -> DataSet:
    """Return what a small model of this name learns from: images, or text."""
    return small_text() if name in NAMES else small_data()


LANGUAGE = pytest.param(
    "gpt2", marks=pytest.mark.skipif(not find_spec("transformers"), reason="no transformers")
)
"""A language model, wherever a test of image classifiers can have one."""


def folder_data(root: Path, train: int = 40, test: int = 20) -> DataSet:
    """The same images as a folder of PNG files."""
    data = small_data(train, test)
    for name, split in (("train", data.train), ("val", data.test)):
        for index in range(len(split)):
            label = data.class_names[int(split.labels[index])].replace("/", "-")
            folder = root / name / label
            folder.mkdir(parents=True, exist_ok=True)
            split.read(index).save(folder / f"{index:03d}.png")
    return open_data(str(root))


def change(path: Path, **values: Any) -> dict[str, Any]:
    """Change entries of a JSON file of ours, with the right checksum; return its content."""
    content = {**json.loads(path.read_text()), **values}
    content.pop("checksum", None)
    write_json(path, content)
    return content


PLAIN = {"scale": None, "crop_padding": 2, "color_jitter": 0.0}
"""An augmentation that whole batches can have at once."""
TINY: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {
        "img_size": 28,
        "patch_size": 14,
        "depth": 2,
        "embed_dim": 16,
        "num_heads": 4,
    },
    "resnet18d": {
        "img_size": 28,
        "channels": [4, 4, 8, 8],
        "layers": [1, 1, 1, 1],  # half the time and half the files of two blocks a stage
        "stem_width": 4,
    },
}
TINY_TEXT: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16},
}


def small_recipe(**settings: Any) -> Recipe:
    """A recipe for tests: small batches, one epoch of warm-up."""
    return Recipe(
        **{"batch_size": 8, "lr": 1e-3, "warmup_epochs": 1.0, "smoothing": 0.1, **PLAIN, **settings}
    )


def small_task(
    name: str,
    data: DataSet,
    *,
    arguments: dict[str, Any] | None = None,
    epochs: float = 3,
    seed: int = 1,
    **settings: Any,
) -> Task:
    recipe = small_recipe(**settings)
    spec = rbdc.ModelSpec(name=name, arguments=arguments or {**TINY, **TINY_TEXT}[name])
    spec = fit_to_data(spec, data, recipe)
    image = input_format(spec, recipe, data)
    return Task(
        model=spec,
        recipe=recipe,
        image=image,
        epochs=epochs,
        seed=seed,
        data_seed=seed,
        warmup_epochs=1.0,
    )


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first worker to ask for it makes. Nobody may change it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
    folder, done = root / "shared" / name, root / "shared" / f"{name}.done"
    folder.parent.mkdir(exist_ok=True)
    with done.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            make(folder)
            done.touch()
    return folder


def own_copy(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return this worker's copy of such a folder: its tests may change it."""
    return Path(shutil.copytree(made_once(factory, name, make), factory.mktemp("runs") / name))


QUICK = Machine(device="cpu", threads=1, workers=0, tensorboard=False)


class Prepared(Protocol):
    """A training or a transfer that is ready to start."""

    def run(self) -> Run: ...


def started(
    prepared: Prepared, output: Path, watch: Watcher = lambda _event: None, **where: Any
) -> Any:
    """Run it in `output`, one job at a time unless `where` says otherwise; return the result."""
    return start(prepared.run(), output, Where(**{"machine": QUICK, **where}), watch)


def train(
    task: Task,
    data: DataSet,
    folder: Path,
    *,
    start: Callable[[], Start],
    machine: Machine = QUICK,
    world: World | None = None,
    teacher: nn.Module | None = None,
    blocks: int = 1,
    flops: tuple[float, float] = (0.0, 0.0),
    observe: Callable[[Any], None] = lambda _progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train a model in one session."""
    world = world or World()
    problem = make_problem(task, data, start, machine, world, teacher=teacher, blocks=blocks)
    with Session(
        problem, folder, machine=machine, world=world, flops=flops, observe=observe
    ) as session:
        return run_session(session, stopped)


def forked(target: Callable[..., None], *args: Any) -> ForkProcess:
    """Start `target` in a process of its own: a copy of this one, so that it starts in no time."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(target, *args))
    process.start()
    return process


def _alone(target: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's other threads were not copied: waiting for them is for ever
    target(*args)


def forked_command(
    words: list[str],
    said: Path,
    main: Callable[[list[str]], Any] = main,
    fork: Callable[..., ForkProcess] = forked,
) -> ForkProcess:
    """Start a command as the head of a process group; what it says goes into a file.

    It is a copy of this process: a new one would spend seconds on imports.
    """
    said.touch()
    return fork(_command, words, said, main)


def _command(words: list[str], said: Path, main: Callable[[list[str]], Any]) -> None:
    os.setsid()
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # the copied one is ours
    sys.exit(main(words))


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until the condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
