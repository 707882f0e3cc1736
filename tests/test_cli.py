"""The command line, as a user meets it."""

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import rbdc
from rbdc.cli import main, make_parser
from rbdc.commands.options import given_settings
from rbdc.commands.plan import plan_parser
from rbdc.plan import make_plan
from rbdc.settings import PLAN, Cluster, Duration, Machine, Recipe, Request
from tests.support import SMALL, images, parents

SMALL_PLAN = [
    "plan",
    "deit_tiny_patch16_224",
    "--img-size=28",
    "--model-kwargs",
    "patch_size=4",
    "embed_dim=64",
    "num_heads=4",
    "depth=2",
]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    models = parents("resnet18d")
    return [str(rbdc.export(m, tmp_path / side)) for side, m in zip("ab", models, strict=True)]


def test_help_needs_neither_torch_nor_timm() -> None:
    script = (
        "import sys; from rbdc.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_plan_prints_a_table_and_draws_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    assert main([*SMALL_PLAN, "--steps=2", "--budget=0.7", f"--plot={picture}"]) == 0
    assert "4 × width 0.25" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


def test_plan_as_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps=2", "--ratio=2", "--epochs=40", "--images=1000", "--json"]
    assert main([*SMALL_PLAN, *options]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [stage["epochs"] for stage in content["stages"]] == [10, 20, 40]
    assert content["model"]["arguments"]["depth"] == 2
    assert content["normalized_flops"] == pytest.approx(
        content["training_flops"] / content["baseline_flops"]
    )


def test_couple_writes_what_timm_loads(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide"
    assert main(["couple", *folders, f"--output={wide}"]) == 0
    assert "proof" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{wide}", pretrained=True)
    first, second = (rbdc.load(folder) for folder in folders)
    assert rbdc.verify_coupling(first, second, model, images(model)).holds
    assert main(["couple", *folders, f"--output={wide}"]) == 2
    assert main(["couple", *folders, f"--output={wide}", "--force", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["coupling"]["proof_error"] <= 1e-5 and record["coupling"]["norm_drift"] == 0
    random = ["--off-diagonal=random", "--seed=1", "--force", "--json"]
    assert main(["couple", *folders, f"--output={wide}", *random]) == 0
    assert json.loads(capsys.readouterr().out)["coupling"]["seed"] == 1


def test_an_inexact_coupling_says_that_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "deit_tiny_patch16_224"
    a, b = (
        str(rbdc.export(model, tmp_path / side))
        for side, model in zip("ab", parents(name, **SMALL[name], qk_norm=True), strict=True)
    )
    assert main(["couple", a, b, f"--output={tmp_path / 'wide'}", "--allow-inexact"]) == 0
    output = capsys.readouterr().out
    assert "inexact: even with norms per branch" in output and "proof" not in output
    seed = ["--off-diagonal=random", "--allow-inexact", f"--seed={10**30}"]
    assert main(["couple", a, b, f"--output={tmp_path / 'x'}", *seed]) == 2
    assert "seed is" in capsys.readouterr().err


def test_an_error_is_two_lines_whatever_a_library_says() -> None:
    assert str(rbdc.RbdcError("first\nsecond", "remedy")) == "first second\nremedy"


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    command = [sys.executable, "-m", "rbdc.cli", *SMALL_PLAN, "--budget=1", "--steps=2", "--json"]
    with subprocess.Popen(
        [*command, f"--plot={picture}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0 and picture.exists()


def test_the_command_lines_defaults_are_those_of_python() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(make_plan).parameters.items()
        if name not in ("model", "growth", "shares", "speeds", "batch_size")  # of a run, --speeds
    }
    parsed = plan_parser().parse_args(["resnet18"])
    assert not given_settings(parsed, Request).keys() - {"model"}, "nothing is given"
    own = {name: getattr(parsed, name) for name in ("warmup_epochs", "images")}
    assert own | {name: getattr(Request(), name) for name in PLAN} == defaults


@pytest.mark.parametrize("command", ["train", "compare", "transfer", "plan"])
def test_help_is_a_screen_and_all_of_it_on_demand(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([command, *words])
        assert end.value.code == 0
        return capsys.readouterr().out

    brief, complete = shown("--help"), shown("--help", "all")
    assert shown("-h") == brief
    assert len(brief.splitlines()) <= 46
    assert max(map(len, complete.splitlines())) <= 100
    assert f"`rbdc {command} --help all`" in brief and "--help all`" not in complete
    options = {option for action in make_parser()._actions for option in _options(action, command)}
    for option in options - {"-h", "--help"}:
        positive = option.replace("--no-", "--", 1)
        assert option in complete or f"--[no-]{positive[2:]}" in complete, option
    assert main([command, "--help", "everything"]) == 2


def _options(action: argparse.Action, command: str) -> list[str]:
    parser = dict(action.choices or {}).get(command) if action.dest == "subcommand" else None
    return [option for own in parser._actions for option in own.option_strings] if parser else []


def test_options_are_read_as_settings_and_absent_if_not_given() -> None:
    words = [
        "--lr=1e-3", "--scale", "0.5,1.0", "--mean", "0.1", "0.2", "--std", "[0.3, 0.4]", "--amp",
        "--no-filter-bias-and-bn", "--aa=null", "--warmup-epochs",
        "500 steps", "--model-kwargs", "depth=6", "act=gelu", "--transition", "restart,carry",
        "--gpus-per-job", "2", "1", "--data=1234", "--threads=3",
    ]  # fmt: skip
    parsed = make_parser().parse_args(["train", *words])
    assert given_settings(parsed, Recipe) == {
        "lr": 0.001,
        "scale": (0.5, 1.0),
        "mean": (0.1, 0.2),
        "std": (0.3, 0.4),
        "amp": True,
        "filter_bias_and_bn": False,
        "aa": None,
        "warmup_epochs": Duration(500, "steps"),
    }
    assert given_settings(parsed, Request) == {
        "model_kwargs": {"depth": 6, "act": "gelu"},
        "transition": ("restart", "carry"),
        "data": "1234",
    }
    assert given_settings(parsed, Cluster) == {"gpus_per_job": (2.0, 1.0)}
    assert given_settings(parsed, Machine) == {"threads": 3}


def test_plan_and_train_have_the_same_options() -> None:
    """By the same fields; a plan alone asks for the number of images."""
    plan, train = (
        {option for action in make_parser()._actions for option in _options(action, command)}
        for command in ("plan", "train")
    )
    assert {f"--{name.replace('_', '-')}" for name in PLAN} <= plan & train
    assert {"--width", "--img-size", "--model-kwargs"} <= plan & train


BAD = {
    "no command": ([], "no command was given"),
    "unknown command": (["plna"], "plna"),
    "unknown option": (
        ["plan", "resnet18", "--bugdet=1"],
        "Did you mean --budget or --budget-time or --budget-hours?",
    ),
    "not a number": (["plan", "resnet18", "--budget=much"], "--budget got much, expected a number"),
    "near command": (["trian"], "Did you mean train or transfer?"),
    "stray word": (["plan", "resnet18", "resnet50", "--budget=1"], "resnet50"),
    "no value": (["plan", "resnet18", "--budget"], "--budget: expected one argument"),
    "no whole number": (["train", "--batch-size=1.5"], "--batch-size got 1.5, expected a whole"),
    "near choice": (["train", "--sched=cosin"], "Did you mean cosine?"),
    "near name in a list": (["train", "--transition=restart,cary"], "Did you mean carry?"),
    "no length": (["train", "--warmup-epochs=5 stps"], "Did you mean steps?"),
    "too many": (["train", "--scale", "0.1", "0.2", "0.3"], "expected a list: 2 of a number"),
    "infinite": (["train", "--lr=inf"], "--lr got inf, expected a number"),
    "switch with a value": (["train", "--amp=yes"], "--amp"),
    "unknown model": (["plan", "resnet19", "--budget=1"], "Did you mean resnet18"),
    "ratio": ([*SMALL_PLAN, "--budget=1", "--ratio=0"], "ratio is 0"),
    "budget": ([*SMALL_PLAN, "--budget=-0.5"], "budget is -0.5"),
    "no epochs": ([*SMALL_PLAN, "--budget=0.001"], "rounds to 0"),
    "steps": ([*SMALL_PLAN, "--budget=1", "--steps=3"], "At most 2 recursive steps"),
    "images": ([*SMALL_PLAN, "--budget=1", "--images=0"], "images is 0"),
    "no blocks": (
        ["plan", "vit_tiny_patch16_224", "--budget=1", "--model-kwargs=depth=0"],
        "depth",
    ),
    "no width": ([*SMALL_PLAN[:-1], "embed_dim=0", "--budget=1"], "each key once"),
    "no patch": (["plan", "vit_base_patch16_224", "--budget=1", "--model-kwargs=patch_size=0"], ""),
    "negative size": (
        ["plan", "resnet18", "--budget=1", "--img-size=-28"],
        "img-size is -28, expected at least 1",
    ),
    "no channels": (["plan", "resnet18", "--budget=1", "--model-kwargs=channels=[]"], "channels"),
    "few stages": (["plan", "resnet18", "--epochs=9", "--model-kwargs=channels=[8,8]"], "layer3"),
    "size twice": ([*SMALL_PLAN, "img_size=32", "--budget=1"], "given twice"),
    "model kwargs": ([*SMALL_PLAN, "depth", "--budget=1"], "expected KEY=VALUE"),
    "picture": ([*SMALL_PLAN, "--budget=1", "--plot=plan.gif"], "plan.gif is not a picture"),
    "no folder": (["couple", "nowhere", "elsewhere", "--output=x"], "nowhere does not exist"),
    "output in a file": (
        ["couple", "a", "b", f"--output={__file__}/wide"],
        "not a writable folder",
    ),
    "no output": (["couple", "a", "b"], "output"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_is_two_lines_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert not output
    assert len(errors.strip().splitlines()) == 2 and errors.startswith("error: ")
    assert expected in errors


def test_a_mistake_in_coupling_is_two_lines_and_nothing_is_written(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide"
    other = rbdc.export(parents("resnet50d", **SMALL["resnet50d"])[0], tmp_path / "other")
    for first, second, expected in (
        (folders[0], folders[0], "same model"),
        (folders[0], str(other), "depth of layer1 is 2 in the first parent and 3 in the second"),
    ):
        assert main(["couple", first, second, f"--output={wide}"]) == 2
        errors = capsys.readouterr().err
        assert expected in errors and len(errors.strip().splitlines()) == 2
        assert not wide.exists()
    assert main(["couple", folders[0], folders[0], f"--output={wide}", "--allow-identical"]) == 0
