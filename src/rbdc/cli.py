"""The command line: `rbdc plan`, `rbdc train`, `rbdc compare` and the others.

One thin function a command; what needs torch is imported when the command runs, so that --help
answers at once. A user's mistake ends with two lines on stderr and exit code 2.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from rbdc import __version__
from rbdc.errors import Interrupted, RbdcError
from rbdc.options import (
    PLAN_OPTIONS,
    comma_separated,
    comma_separated_numbers,
    given_settings,
    keyword_arguments,
    make_parser,
)
from rbdc.recipes import Machine, Recipe, Request, read_recipe, split_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "RANK" in os.environ:  # DDP is told to look for unused parameters, and would complain
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        parsed = make_parser(__version__).parse_args(
            list(sys.argv[1:] if arguments is None else arguments)
        )
        command = {
            "plan": _plan,
            "train": _train,
            "compare": _compare,
            "reproduce": _reproduce,
            "status": _status,
            "report": _report,
            "export": _export,
            "couple": _couple,
        }
        command[parsed.subcommand](parsed[parsed.subcommand])
    except Interrupted as interruption:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one says it for all
            print(f"{interruption}; saved. The same command goes on from there.", file=sys.stderr)
        return 75  # EX_TEMPFAIL: try again later
    except RbdcError as error:
        print(f"error: {error.problem}\n{error.remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no space, no permission: nothing half-written is left behind
        print(f"error: {error}\nCheck the disk and its permissions.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _plan(options: Namespace) -> None:
    from rbdc.budget import make_plan
    from rbdc.models import ModelSpec
    from rbdc.report.plan import plan_table, save_plan_plot

    if options.plot:
        _check_picture(options.plot)
    arguments = keyword_arguments(options.model_kwargs)
    if options.img_size is not None:
        if "img_size" in arguments:
            raise RbdcError("the image size was given twice", "Give --img-size once.")
        arguments["img_size"] = options.img_size
    plan = make_plan(
        ModelSpec(name=options.model, width=options.width, arguments=arguments),
        **{name: options[name] for name in PLAN_OPTIONS},
    )
    if options.plot:
        save_plan_plot(plan, options.plot)
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        _print(plan_table(plan))


def _train(options: Namespace) -> None:
    from rbdc.report.live import LiveRun
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.run import result_lines
    from rbdc.training import join_world
    from rbdc.training.world import leave_world
    from rbdc.tree.prepare import prepare

    given = given_settings(options, Request) | given_settings(options, Recipe)
    name = options.recipe or _default_recipe(given)
    request, recipe = split_settings(read_recipe(name), given)
    machine = Machine(**given_settings(options, Machine))
    output = options.output or Path("runs") / Path(name).stem
    world = join_world(machine.device)
    try:
        prepared = prepare(request, recipe, world)
        prepared.check(output, machine=machine, jobs=options.jobs, world=world)
        if world.is_main:
            _introduce(prepared, name, output)
        if options.dry_run:
            return
        console = _console(quiet=not world.is_main)
        with LiveRun(prepared.tree.all, prepared.work(), console) as live:
            result = prepared.run(
                output, machine=machine, watch=live, jobs=options.jobs, world=world
            )
        if world.is_main:
            print("\n" + "\n".join(result_lines(result, output)))
            print(f"open       {write_report([output], output / REPORT)}")
    finally:
        leave_world()


def _compare(options: Namespace) -> None:
    if options.protocols == ["list"]:
        from rbdc.growth import protocols

        for name, protocol in protocols().items():
            words = f"\n{'':16} after a colon: {protocol.words}" if protocol.words else ""
            print(f"{name:16} {protocol.summary}{words}")
        return
    from rbdc.experiments.compare import Asked, prepare_comparison
    from rbdc.training import join_world
    from rbdc.training.world import leave_world

    given = given_settings(options, Request) | given_settings(options, Recipe)
    name = options.recipe or _default_recipe(given)
    asked = Asked(
        protocols=comma_separated(options.protocols),
        budgets=comma_separated_numbers("--budgets", options.budgets),
        standard_budgets=comma_separated_numbers("--standard-budgets", options.standard_budgets),
        seeds=options.seeds,
        tune=comma_separated_numbers("--tune", options.tune),
        tune_budget=options.tune_budget,
    )
    machine = Machine(**given_settings(options, Machine))
    output = options.output or Path("runs") / f"compare-{Path(name).stem}"
    world = join_world(machine.device)
    try:
        settings = split_settings(read_recipe(name), given)
        comparison = prepare_comparison(*settings, asked, world)
        _run_comparison(comparison, output, machine, options, world)
    finally:
        leave_world()


def _reproduce(options: Namespace) -> None:
    from rbdc.experiments.reproduce import imagenet_outline, prepare_case, read_experiment
    from rbdc.training import join_world
    from rbdc.training.world import leave_world

    experiment = read_experiment(options.experiment, options.scale)
    given = keyword_arguments(options.set, "--set")
    given |= {"data": options.data} if options.data else {}
    outline = None
    if options.scale == "paper" and not options.data:
        if not options.dry_run:
            raise RbdcError(
                "the paper's experiments need ImageNet", "Give its folder with --data PATH."
            )
        outline = imagenet_outline()
    machine = Machine(**given_settings(options, Machine))
    output = options.output or Path("runs") / f"{options.experiment}-{options.scale}"
    world = join_world(machine.device)
    try:
        cases = [
            (case, prepare_case(case, given, seeds=options.seeds, world=world, data=outline))
            for case in experiment.cases
        ]
        if world.is_main and not options.json:
            print(experiment.head)
        for case, comparison in cases:
            if world.is_main and not options.json:
                print(
                    f"\n{case.name}: {comparison.setting.model} on {comparison.setting.data.name}"
                )
            if options.dry_run and world.is_main:
                _hours(comparison, machine, options.images_per_second)
            _run_comparison(comparison, output / case.name, machine, options, world)
    finally:
        leave_world()


def _hours(comparison: Any, machine: Machine, images_per_second: float | None) -> None:
    """What a case would take, from the speed at which the target trains."""
    from rbdc.report.compare import hours_lines
    from rbdc.tree.measure import images_per_second as measured

    setting = comparison.setting
    measured_here = images_per_second is None
    if images_per_second is None:
        task = setting.training("target", 0, setting.baseline_epochs).task
        images_per_second = measured(task, setting.data, machine)
    _, shared = comparison.flops(comparison.planned())
    passes = shared / setting.baseline_flops * setting.baseline_epochs
    images = passes * len(setting.data.train)
    print("\n".join(hours_lines(images / images_per_second, images_per_second, measured_here)))


def _run_comparison(
    comparison: Any, output: Path, machine: Machine, options: Namespace, world: Any
) -> None:
    from rbdc.experiments.compare import unique
    from rbdc.report.compare import cost_lines, plan_lines
    from rbdc.report.live import LiveRun

    if not options.dry_run:
        comparison.check(output, machine=machine, jobs=options.jobs, world=world)
    planned = comparison.planned()
    nodes = unique(planned)
    console = _console(quiet=not world.is_main or options.json)
    alone, shared = comparison.flops(planned)
    costs = cost_lines(len(planned), len(nodes), alone, shared, comparison.setting.baseline_flops)
    setting = comparison.setting
    about = (
        f"{setting.model} on {setting.data.name}, {setting.baseline_epochs:g} epochs of standard "
        f"training; seeds {comparison.asked.seeds}"
    )
    console.print(plan_lines(comparison.planned_rows()))
    console.print("\n".join([about, *costs, f"output {output}\n"]), highlight=False)
    if options.dry_run:
        return
    try:
        with LiveRun(nodes, comparison.work(nodes), console) as live:
            comparison.run(
                output,
                machine=machine,
                watch=live,
                jobs=options.jobs,
                world=world,
                announce=lambda nodes: live.expect(nodes, comparison.work(nodes)),
            )
    except Interrupted:
        if world.is_main:
            _show_comparison(output, options, console)  # what there is
        raise
    if world.is_main:
        _show_comparison(output, options, console)


def _show_comparison(output: Path, options: Namespace, console: Any) -> None:
    from rbdc.experiments.results import read_summary
    from rbdc.report.compare import comparison_table, save_comparison_plots
    from rbdc.report.page import REPORT, write_report

    summary = read_summary(output)
    if summary is None:
        return
    if options.json:
        print(json.dumps(summary, indent=2))
    console.print(comparison_table(summary))
    for path in save_comparison_plots(summary, output):
        console.print(f"picture {path}", highlight=False)
    console.print(f"page {write_report([output], output / REPORT)}", highlight=False)


def _introduce(prepared: Any, name: str, output: Path) -> None:
    from rbdc.report.plan import plan_table

    recipe, data = prepared.recipe, prepared.data
    _print(plan_table(prepared.plan))
    print(
        f"recipe {name}: {recipe.opt}, learning rate {recipe.learning_rate:.3g} at a batch of "
        f"{recipe.batch_size}, transition {', '.join(prepared.request.transition)}\n"
        f"data {data.name}: {len(data.train):,} training and {len(data.test):,} test images, "
        f"{len(data.class_names)} classes\n"
        f"output {output}\n"
    )
    for image in data.skipped:
        print(f"skipped, cannot be decoded: {image}")


def _default_recipe(given: dict[str, Any]) -> str:
    """The demo; or for a model that is named, its family's."""
    if "model" not in given:
        return "demo"
    from rbdc.models import as_spec, family

    return family(as_spec(given["model"])).recipe


def _status(options: Namespace) -> None:
    if options.watch:
        from rbdc.report.watch import watch_run

        every = 2.0 if options.every is None else options.every
        watch_run(options.run, _console(), every=every, as_json=options.json)
        return
    if options.every is not None:
        raise RbdcError("--every was given without --watch", "Add --watch, or leave it out.")
    from rbdc.report.run import run_status, status_table

    status = run_status(options.run)
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        _print(status_table(status))


def _report(options: Namespace) -> None:
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.paper import save_figures

    folders = list(dict.fromkeys(options.runs))
    if options.serve:
        _serve(folders, options.port)
        return
    if options.figures:
        for path in save_figures(folders, options.figures):
            print(f"figure {path}")
    print(f"page {write_report(folders, options.output or folders[0] / REPORT)}")


def _serve(folders: Sequence[Path], port: int) -> None:
    from rbdc.report.page import read_state
    from rbdc.report.serve import make_server

    read_state(folders)  # a mistake is said here
    with make_server(folders, port) as server:
        print(f"http://{server.server_address[0]!s}:{server.server_address[1]}  (Ctrl-C ends it)")
        sys.stdout.flush()
        server.serve_forever()


def _export(options: Namespace) -> None:
    from rbdc.report.card import export_lines, export_run

    export_run(options.run, options.output, license=options.license, force=options.force)
    print("\n".join(export_lines(options.run, options.output)))


def _couple(options: Namespace) -> None:
    from rbdc.models import couple_folders

    record = couple_folders(
        options.first,
        options.second,
        options.output,
        model=options.model,
        arguments=keyword_arguments(options.model_kwargs),
        off_diagonal=options.off_diagonal,
        seed=options.seed,
        force=options.force,
        allow_identical=options.allow_identical,
        allow_inexact=options.allow_inexact,
        use_ema=not options.no_ema,
    )
    if options.json:
        print(json.dumps(record, indent=2))
        return
    coupling = record["coupling"]
    error, drift = coupling["proof_error"], coupling["norm_drift"]
    print(f"{options.output}: {record['spec']['name']} at width {record['spec']['width']:g}")
    if options.off_diagonal == "zero" and not coupling["exact"]:
        print(f"inexact: even with norms per branch it is {error:.1e} off its parents' mean")
    elif options.off_diagonal == "zero":
        print(f"proof: with norms per branch it is its parents' mean, to {error:.1e} of the logits")
    else:
        print(f"random off-diagonal blocks: {error:.1e} of the logits from its parents' mean")
    print(f"drift: joint normalisation moves its logits by {drift:.1e}")
    load = 'timm.create_model("local-dir:{}", pretrained=True)' if record["timm_loads"] else None
    print("load it with " + (load or 'rbdc.load("{}")').format(options.output))
    if not coupling["class_names_compared"]:
        print("note: a parent carries no class list, so the order of classes was not compared")


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RbdcError(f"{path} is not a picture's name", "End it in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise RbdcError(f"{path.parent} is not a folder", "Make it first, or choose another.")


def _print(renderable: Any) -> None:
    _console().print(renderable)


def _console(*, quiet: bool = False) -> Any:
    from rich.console import Console

    console = Console(quiet=quiet)
    # a file or a pipe: nothing to fit into
    return console if console.is_terminal else Console(width=140, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
