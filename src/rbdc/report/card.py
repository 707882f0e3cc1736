"""Implement `rbdc export`: write a finished run's model with its card, ready for a model hub.

OUTPUT/
  model.safetensors, config.json, rbdc.json   the run's model, as timm loads it
  README.md                                   the model card
  recipe.yaml                                 every setting, to repeat the run with
  figures/budget.png, figures/curves.png      the card's figures
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rbdc.disk import is_writable, read_json, sha256_of, whole_folder
from rbdc.errors import CheckpointError, RunError
from rbdc.jobs.layout import MODEL, RESULT
from rbdc.models.folder import CONFIG, RECORD, WEIGHTS
from rbdc.report.card_text import card_text, repeat_settings
from rbdc.report.figures import draw_budget, draw_curves, save_each
from rbdc.report.read import read_run
from rbdc.report.run import how_to_load, run_status

CARD, SETTINGS, FIGURES = "README.md", "recipe.yaml", "figures"
_MODEL_FILES = (WEIGHTS, CONFIG, RECORD)
_OURS = {*_MODEL_FILES, CARD, SETTINGS, FIGURES}


def export_run(run: Path, output: Path, *, license: str | None = None, force: bool = False) -> Path:
    """Write the model of a finished run with its card, whole or not at all; return the folder.

    Weights are copied byte for byte. `license` is Hugging Face's identifier of a licence; the card
    names none unless it is given. `force` replaces an earlier export, and nothing else.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise RunError(
            f"{license!r} is no name of a licence",
            "Use Hugging Face's, in small letters: apache-2.0, mit, cc-by-4.0, other.",
        )
    _check_finished(run)
    output = output.resolve()
    _check_output(output, force=force)
    content = read_run(run)
    if content["missing"]:
        raise RunError(
            f"{run} cannot be read whole: {content['missing'][0]}",
            "Give the run's command again, then export it.",
        )
    with whole_folder(output) as partial:
        _write(partial, run, content, license)
    return output


def export_lines(run: Path, output: Path) -> list[str]:
    """Return the lines that say how to read, load and upload the folder."""
    timm_loads = (read_json(run / RESULT) or {})["timm_loads"]
    return [
        f"read         {output / CARD}",
        f"load with    {how_to_load(output, timm_loads=timm_loads)}",
        f"upload with  hf upload USER/NAME {output}",
    ]


def _write(folder: Path, run: Path, content: Mapping[str, Any], license: str | None) -> None:
    (folder / FIGURES).mkdir()
    for name in _MODEL_FILES:
        shutil.copyfile(run / MODEL / name, folder / name)
    if (read_json(folder / RECORD) or {}).get("sha256") != sha256_of(folder / WEIGHTS):
        raise CheckpointError(
            f"{run / MODEL / WEIGHTS} does not have the checksum written in {RECORD}",
            "The file is damaged or was replaced: give the run's command again.",
        )
    settings = yaml.safe_dump(repeat_settings(content), sort_keys=False)
    (folder / SETTINGS).write_text(settings, encoding="utf-8")
    config, scale = read_json(folder / CONFIG) or {}, content["about"]["baseline_flops"]
    figures = {  # None where the logs are gone
        "budget": draw_budget(content["levels"], baseline_flops=scale),
        "curves": draw_curves(content["nodes"].values(), baseline_flops=scale),
    }
    drawn = [path.name for path in save_each(figures, folder / FIGURES, ["png"])]
    card = card_text(content, config["pretrained_cfg"], license, drawn)
    (folder / CARD).write_text(card, encoding="utf-8")


def _check_finished(run: Path) -> None:
    """Refuse a run that has no model to export, and say how far it is."""
    status = run_status(run)
    if status["kind"] == "transfer":
        raise RunError(
            f"{run} holds detectors, and timm has none: there is no timm model to export",
            "rbdc.transfer.load_detector loads them from its jobs/*/model.",
        )
    if status["kind"] == "compare":
        raise RunError(
            f"{run} is a comparison of many models: it has no one model",
            "Name the folder of one `rbdc train`; models of a comparison lie in its jobs/*/model.",
        )
    nodes, result = status["nodes"], status["result"] or {"nodes": {}}
    if not all(node["state"] == "done" and node["name"] in result["nodes"] for node in nodes):
        trainings = [node for node in nodes if node["kind"] == "train"]
        done = sum(node["state"] == "done" for node in trainings)
        share = status["spent_flops"] / status["planned_flops"]
        failed = [f", and {node['name']} failed" for node in nodes if node["state"] == "failed"]
        raise RunError(
            f"{run} is not finished: {done} of {len(trainings)} models are trained, "
            f"{share:.1%} of the FLOPs are spent{''.join(failed[:1])}",
            "Wait until it is: rbdc status --watch."
            if status["running"]
            else "Give the run's command again to go on with it.",
        )
    if lost := [name for name in _MODEL_FILES if not (run / MODEL / name).is_file()]:
        raise RunError(f"{run / MODEL} has no {lost[0]}", "Give the run's command again.")


def _check_output(output: Path, *, force: bool) -> None:
    if output.is_dir() and (content := {path.name for path in output.iterdir()}):
        if not force:
            raise RunError(
                f"{output} exists and is not empty", "Choose another folder, or use --force."
            )
        drawn = {path.name for path in (output / FIGURES).glob("*")}
        if content != _OURS or not drawn <= {"budget.png", "curves.png"}:
            raise RunError(
                f"{output} is not just what an export wrote, so it is not replaced even by force",
                "Choose another folder, or remove this one yourself.",
            )
    if not is_writable(output.parent) or (output.exists() and not output.is_dir()):
        raise RunError(
            f"{output} cannot be written: where it is to be is not a folder one may write to",
            "Choose another folder.",
        )
