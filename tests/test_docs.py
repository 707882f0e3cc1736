"""What the documentation shows is what the program does."""

import re
import shlex
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import timm
import timm.utils
import torch

import rbdc
from rbdc.cli import main, make_parser
from rbdc.data.text_sources import embedded_text
from rbdc.models import families
from rbdc.settings import Machine
from scripts.drawings import draw
from tests.support import TINY_TEXT, folder_data, parents, randomized
from tests.test_architecture import ORDER
from tests.transfer.scenes import classifier, write_scenes, write_split

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = r"^```(?P<language>\S*)\n(?P<body>[\s\S]*?)^```$"
COMMAND = r"(?:rbdc|torchrun) (?:[^\n]*\\\n)*[^\n]*$"
INDENTED = rf"^ {{4}}(?P<command>{COMMAND})"

TEXT = "docs/language.md"
"""A page whose trainings learn from a text, not from images."""
PLAYS = "--data plays.txt --batch-size 4 --threads 1 --jobs 1 --workers 0 --no-tensorboard"
SHORTER_TEXT = {
    "train": f"{PLAYS} --baseline-epochs 1",
    "compare": f"{PLAYS} --baseline-epochs 1 --budgets 1.0 --seeds 1",
}

# What makes a training one of seconds; the last word on the command line is the one that counts.
SMALL = "--data photos --in-memory --batch-size 8 --threads 1 --jobs 1 --workers 0 --no-tensorboard"
SHORTER = {
    "train": f"{SMALL} --baseline-epochs 2 --rounding none",
    "compare": f"{SMALL} --baseline-epochs 4 --budgets 1.0 --seeds 1",
    "reproduce": "--dry-run --images-per-second 1000 --threads 1",
    "transfer": "--epochs 1 --seeds 1 --batch-size 2 --min-size 32 --max-size 64 --channels 8 "
    "--regions 8 --proposals 20 --threads 1 --jobs 1 --workers 0 --no-tensorboard",
}
SHORT: dict[str, Any] = {  # the same for `rbdc.train`
    "data": "photos",
    "in_memory": True,
    "batch_size": 8,
    "baseline_epochs": 2.0,
    "rounding": "none",
    "machine": Machine(threads=1, workers=0, tensorboard=False),
    "jobs": 1,
}
ENDLESS = {"--serve", "--watch"}


@dataclass(frozen=True)
class Step:
    """What a page shows to be done next."""

    python: str = ""
    words: tuple[str, ...] = ()
    """Of a command, behind `rbdc`."""
    needs: str = ""
    """What a command is marked to need."""

    def shorter(self, page: str = "") -> list[str]:
        of_text = page == TEXT or "gpt-demo" in self.words
        options = SHORTER_TEXT if of_text else SHORTER
        words = [*self.words, *options.get(self.words[0], "").split()]
        if of_text and words[0] in options and "--model-kwargs" not in words:
            words += [
                "--model-kwargs",
                *(f"{name}={value}" for name, value in TINY_TEXT["gpt2"].items()),
            ]
        if "--engine" in self.words:  # it decides itself how many at a time
            words = " ".join(words).replace(" --jobs 1", "").split()
        by_epochs = self.words[0] == "train" and "--epochs" in self.words
        return [*words, "--epochs", "1"] if by_epochs else words


def steps(page: Path) -> Iterator[Step]:
    """The commands and the Python of a page, in its order."""
    for found in re.finditer(f"{FENCED}|{INDENTED}", page.read_text(), flags=re.MULTILINE):
        if found["language"] == "python":
            yield Step(python=found["body"])
        for command in re.findall(f"^{COMMAND}", found["body"] or "", flags=re.MULTILINE):
            yield _command(command)
        if found["command"]:
            yield _command(found["command"])


def _command(line: str) -> Step:
    line, _, comment = line.replace("\\\n", " ").partition(" # ")
    words = shlex.split(line)
    start = words.index("rbdc.cli" if words[0] == "torchrun" else "rbdc") + 1
    needs = comment if comment.startswith("needs ") else ""
    return Step(words=tuple(words[start:]), needs=needs)


def write_checkpoint(model: Any, folder: Path) -> None:
    """Write last.pth.tar as timm's train.py does."""
    folder.mkdir(parents=True)
    arguments = Namespace(model=model.pretrained_cfg["architecture"], model_kwargs={}, lr=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = timm.utils.CheckpointSaver(
        model, optimizer, args=arguments, checkpoint_dir=str(folder), recovery_dir=str(folder)
    )
    saver.save_checkpoint(0)


STEPS = {str(page.relative_to(ROOT)): list(steps(page)) for page in PAGES}
COMMANDS = [step for found in STEPS.values() for step in found if step.words]


def test_most_commands_are_run() -> None:
    assert len(COMMANDS) >= 20
    marked = [step for step in COMMANDS if step.needs]
    assert len(marked) <= len(COMMANDS) / 4
    assert all("GPU" in step.needs for step in marked), marked


@pytest.mark.parametrize("step", COMMANDS, ids=lambda step: " ".join(step.words))
def test_commands_are_understood(step: Step) -> None:
    """All of them, those that need a GPU among them."""
    make_parser().parse_args(list(step.words))


@pytest.mark.parametrize("name", [name for name, found in STEPS.items() if found])
def test_a_page_can_be_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Do what a page shows, from its top to its end in one folder.

    Plans, couplings and whatever looks at a run are run as they stand. Trainings are run on 40
    images in batches of 8, for a few epochs at most; comparisons so, with one budget and one seed.
    The paper's experiments are only laid out (`tests/test_compare.py` runs one). What is marked as
    needing a GPU, and what goes on until Ctrl-C (`tests/report` runs it), is not run. Python is
    run as it stands, but for the length of its trainings.
    """
    monkeypatch.chdir(tmp_path)
    folder_data(tmp_path / "photos")  # what the reader has: images of his own, a text,
    (tmp_path / "plays.txt").write_text(embedded_text()[:6000])
    if name == "README.md":  # two models,
        for side, model in zip("ab", parents("resnet18d"), strict=True):
            rbdc.export(model, Path("runs") / side)
    if name == "docs/report.md":  # two runs
        for run in ("runs/demo", "runs/other"):
            rbdc.train(run, steps=1, with_baseline=False, **SHORT)
    if name == "docs/loop.md":
        warnings.simplefilter("ignore")  # these libraries warn of each other
        # what timm's train.py wrote
        narrow = timm.create_model("deit_tiny_patch16_224")
        for experiment in "ab":
            narrow.init_weights()
            write_checkpoint(narrow, Path("output/train") / experiment)
    if name == "docs/transfer.md":  # trained classifiers, and images with objects
        for number, run in enumerate(("base", "standard", "rbdc")):
            rbdc.export(classifier(num_classes=number + 2), Path("runs") / run)
        write_scenes(tmp_path / "coco")
        for split in ("mine", "others"):
            annotations = write_split(tmp_path, f"{split}_photos")
            annotations.rename(annotations.with_name(f"{split}.json"))
            shutil.copytree(tmp_path / f"{split}_photos", tmp_path / "photos", dirs_exist_ok=True)
    if name == TEXT:  # two language models
        pytest.importorskip("transformers")
        for seed, side in enumerate("ab"):
            rbdc.export(randomized(rbdc.build("gpt2", **TINY_TEXT["gpt2"]), seed), f"small/{side}")
    monkeypatch.setattr(rbdc, "train", partial(rbdc.train, **SHORT))
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for step in STEPS[name]:
        if step.python:
            exec(compile(step.python, name, "exec"), namespace)
            entries = [value for value in namespace.values() if isinstance(value, families.Family)]
            monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, *entries))
        elif "--engine" in step.words and not step.needs:  # tests/tree starts Ray in a clean one
            command = [sys.executable, "-m", "rbdc.cli", *step.shorter()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        elif not (step.needs or ENDLESS & set(step.words)):
            assert main(step.shorter(name)) == 0, (step.words, capfd.readouterr().err)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_code_fits_on_the_page(page: Path) -> None:
    """A mark, or half a command, must not be where only scrolling shows it."""
    text = page.read_text()
    fenced = [block["body"] for block in re.finditer(FENCED, text, flags=re.MULTILINE)]
    indented = re.findall(r"^ {4}(.*)$", re.sub(FENCED, "", text, flags=re.MULTILINE), re.MULTILINE)
    long = [line for line in [*"\n".join(fenced).splitlines(), *indented] if len(line) > 90]
    assert not long


def options_by_command() -> dict[str, set[str]]:
    (commands,) = (action for action in make_parser()._actions if action.dest == "subcommand")
    assert commands.choices is not None
    return {
        name: {option for action in parser._actions for option in action.option_strings}
        for name, parser in dict(commands.choices).items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_exist(page: Path) -> None:
    """Also those that are only spoken of: `rbdc train --lr ...`, and `--lr` alone."""
    known = options_by_command()
    text = re.sub(FENCED, "", page.read_text(), flags=re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", text):
        words = span.split()
        if words[0] == "rbdc" and words[1:2] and words[1] in known:
            options = known[words[1]]
        elif words[0].startswith("--"):
            options = set().union(*known.values())
        else:
            continue
        said = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert said - {"--no-"} <= options, span


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """By the command of `make docs`; the reference has every command, setting and public name."""
    rule = r"-m sphinx (.*) -d build/doctrees docs build/docs"
    (options,) = re.findall(rule, (ROOT / "Makefile").read_text())
    assert "-W" in options
    site = tmp_path / "site"
    sphinx = [sys.executable, "-m", "sphinx", *options.split(), "-d", str(tmp_path / "trees")]
    built = subprocess.run([*sphinx, str(DOCS), str(site)], capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr
    reference = {page.stem: page.read_text() for page in (site / "reference").glob("*.html")}
    for command, options_of in options_by_command().items():
        assert f"rbdc {command}<" in reference["commands"]
        shown = {
            option for option in options_of if not option.startswith(("--no-", "--help", "-h"))
        }
        assert all(option in reference["commands"] for option in shown)
    for settings in (rbdc.Request, rbdc.Recipe, rbdc.Machine, rbdc.Cluster):
        assert all(f">{field.name}<" in reference["options"] for field in fields(settings))
    for name in rbdc.__all__:
        assert f'id="rbdc.{name}"' in reference["api"]


def test_the_drawings_are_those_of_the_script(tmp_path: Path) -> None:
    drawn = draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in (DOCS / "drawings").iterdir()}
    for path in drawn:
        kept = (DOCS / "drawings" / path.name).read_text()
        if f"Matplotlib v{mpl.__version__}," in kept:  # another version draws a little otherwise
            assert path.read_text() == kept, f"run scripts/drawings.py: {path.name} is another"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for script in re.findall(r"python ((?:benchmarks|scripts)/\w+\.py)", text):
        assert (ROOT / script).exists(), script


def test_contributing_lists_every_room_in_the_order_of_imports() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## The rooms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == ORDER
    source = ROOT / "src/rbdc"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    rooms |= {path.stem for path in source.glob("*.py")} - {"__init__"}
    assert rooms == set().union(*ORDER)
