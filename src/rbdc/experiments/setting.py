"""From a request and a recipe to the setting of trials: data, model, images, teacher."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rbdc.data import DataSet, open_data, open_text
from rbdc.errors import RecipeError
from rbdc.growth import Setting
from rbdc.jobs.engine import MOST_TOGETHER
from rbdc.jobs.ways import WORTH_MEASURING, measure_ways
from rbdc.models import ModelSpec, as_spec, family, record_of
from rbdc.models.language import SEQUENCE, is_language
from rbdc.plan import Growth, Stage
from rbdc.runs.record import read_record
from rbdc.runs.run import Where, settle
from rbdc.settings import Recipe, Request
from rbdc.training import World, fit_to_data
from rbdc.training.choices import choose_precision
from rbdc.training.machine import default_threads
from rbdc.training.teacher import load_teacher


def make_setting(
    request: Request, recipe: Recipe, where: Where | None = None, data: DataSet | None = None
) -> Setting:
    """Open the data unless it is given, fit the model to it, and load the recipe's teacher.

    The precision is decided here, for the device in `where`: it is part of the jobs' keys.
    """
    if request.model is None:
        raise RecipeError("no model is named", "Give --model, a timm name, or a recipe that does.")
    where = settle(where or Where())
    assert where.facts is not None
    recipe = choose_precision(recipe, where.facts)
    arguments = dict(request.model_kwargs)
    if request.img_size is not None:
        arguments["img_size"] = request.img_size
    named = as_spec(request.model, request.width, **arguments)
    data = data or _open(request, named, where.world)
    spec = fit_to_data(named, data, recipe)
    baseline = request.baseline_epochs
    setting = Setting(
        model=spec,
        recipe=recipe,
        data=data,
        baseline_epochs=family(spec).baseline_epochs if baseline is None else baseline,
        growth=Growth.of(request, spec),
        ratio=request.ratio,
        counter=request.counter,
        transition=request.transition,
        carry_warmup_epochs=request.carry_warmup_epochs,
        batches=request.batches,
        narrow_lr=request.narrow_lr,
        allow_inexact=request.allow_inexact,
    )
    teacher = load_teacher(recipe, setting.image, len(data.class_names), request.counter)
    return replace(setting, teacher=teacher)


def _open(request: Request, model: ModelSpec, world: World) -> DataSet:
    def open_it(download: bool) -> DataSet:
        if is_language(model.name):
            return open_text(
                request.data,
                length=record_of(model)[SEQUENCE],
                tokenizer=request.tokenizer,
                vocab_size=model.arguments.get("vocab_size"),
                download=download,
            )
        return open_data(
            request.data,
            folder=request.data_dir,
            download=download,
            in_memory=request.in_memory,
            skip_bad=request.skip_bad,
        )

    if request.data_download and world.size > 1:  # one process downloads, then all read
        world.broadcast(lambda: open_it(True).fingerprint)
        return open_it(False)
    return open_it(request.data_download)


def choose_fused(
    setting: Setting,
    request: Request,
    stages: Sequence[Stage],
    where: Where,
    output: Path | None = None,
) -> Setting:
    """Return the setting with the levels whose models are trained as one.

    It is part of the jobs' keys: a run that has begun in `output` keeps what was chosen for it. One
    process of this machine trains fused models; processes that train one model together, a
    cluster's and those of `--node` train them apart.
    """
    old = read_record(output) if output else None
    if old and old["identity"].get("setting", {}).get("fused") is not None:
        return replace(setting, fused=old["identity"]["setting"]["fused"])
    if request.fuse == "off" or not _can_fuse(setting, where):
        return setting
    sizes: dict[str, int] = {}
    for stage in stages:
        updates = stage.models * stage.epochs * setting.steps_per_epoch
        if stage.models > 1 and (request.fuse == "on" or updates >= WORTH_MEASURING):
            size = _fused_size(setting, stage, request.fuse, where)
            if size > 1:
                sizes[str(stage.level)] = size
    return replace(setting, fused=sizes)


def fuse_all(setting: Setting, request: Request, where: Where) -> Setting:
    """Return the setting with the models of every level trained as one, if that is asked for.

    For comparisons: protocols share jobs, so nothing is chosen by measuring one of them.
    """
    if request.fuse != "on" or not _can_fuse(setting, where):
        return setting
    return replace(setting, fused={str(level): MOST_TOGETHER for level in range(1, MOST_TOGETHER)})


def _can_fuse(setting: Setting, where: Where) -> bool:
    here = where.cluster.engine == "local" and where.world.size == 1 and where.node is None
    # vmap has no rules for what transformers do with masks and caches
    return here and setting.batches == "shared" and not is_language(setting.model.name)


def _fused_size(setting: Setting, stage: Stage, fuse: str, where: Where) -> int:
    job = setting.training(f"{stage.level}.0", 0, stage.epochs, model=stage.model)
    threads = where.machine.threads or default_threads(job.loader_processes(where.machine))
    ways = measure_ways(
        job.task, where.machine, siblings=stage.models, threads=threads, processes=where.jobs
    )
    if fuse == "on":
        ways = [way for way in ways if way.fused > 1] or ways
    return ways[0].fused
