"""`rbdc plan --devices`: a plan on a cluster, as a user meets it."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from rbdc.cli import main
from rbdc.cluster.allocation import plan_cluster
from rbdc.commands.plan import plan_parser
from rbdc.models import ModelSpec
from rbdc.plan import Hardware, make_plan, scaling_of
from tests.support import TINY_TEXT

SIZE = {"img_size": 28, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "depth": 2}
PLAN = [
    "plan",
    "deit_tiny_patch16_224",
    "--steps=2",
    "--epochs=40",
    "--images=10000",
    "--model-kwargs",
    *(f"{name}={value}" for name, value in SIZE.items()),
]


def test_devices_add_a_table_and_simulate_a_chart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    plain = capsys.readouterr().out
    assert main([*PLAN, "--devices=3"]) == 0
    table = capsys.readouterr().out
    assert table.startswith(plain) and "above the bound" in table and "█" not in table
    assert main([*PLAN, "--devices=3", "--simulate"]) == 0
    chart = capsys.readouterr().out
    assert chart.startswith(table) and "2.3 on 1" in chart and "█" in chart
    assert max(map(len, chart[len(table) :].splitlines())) <= 100


def test_the_chart_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "gantt.svg"
    assert main([*PLAN, "--devices=8", f"--gantt={picture}", "--json"]) == 0
    assert "standard training" in picture.read_text()
    assert json.loads(capsys.readouterr().out)["cluster"]["tree"]["devices"] == 8


def test_json_is_what_python_says_with_the_same_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--devices=8", "--images-per-second=900,2000,4000", "--batch-size=256"]
    wires = ["--devices-per-node=4", "--node-bandwidth=100", "--network-bandwidth=10"]
    assert main([*PLAN, *options, *wires, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cluster"]
    spec = ModelSpec(name="deit_tiny_patch16_224", arguments=SIZE)
    plan = make_plan(spec, steps=2, epochs=40, images=10_000)
    hardware = Hardware(
        devices_per_node=4, node_bytes_per_second=100e9, network_bytes_per_second=10e9
    )
    scaling = scaling_of(
        plan, batch_size=256, images_per_second=(900, 2000, 4000), hardware=hardware
    )
    expected = plan_cluster(plan, 8, scaling).to_json()
    assert found == json.loads(json.dumps(expected))


def test_options_have_the_defaults_of_python() -> None:
    defaults = plan_parser().parse_args(["resnet18"])
    known = {field.name: field.default for field in fields(Hardware)}
    assert defaults.devices_per_node == known["devices_per_node"]
    assert 1e9 * defaults.node_bandwidth == known["node_bytes_per_second"]
    assert 1e9 * defaults.network_bandwidth == known["network_bytes_per_second"]
    assert defaults.batch_size == inspect.signature(scaling_of).parameters["batch_size"].default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--simulate"], "nothing says how many devices there are"),
        (["--gantt=gantt.png"], "nothing says how many devices there are"),
        (["--devices=0"], "there are 0 devices"),
        (["--devices=8", "--images-per-second=1,2"], "has 2 numbers, and the plan has 3 levels"),
        (["--devices=8", "--images-per-second=fast"], "expected numbers"),
        (["--devices=8", "--network-bandwidth=0"], "network bytes per second is 0"),
        (["--devices=8", "--devices-per-node=0"], "devices per node is 0"),
        (["--devices=8", "--batch-size=20000"], "there are 10000 training images"),
        (["--devices=8", "--gantt=gantt.txt"], "gantt.txt is not a picture's name"),
    ],
)
def test_mistakes_are_two_lines(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 2


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*PLAN, *options]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_hours_and_money_follow_from_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = "--images-per-second=100,300,500"
    text = run(capsys, speeds, "--loader=200", "--price=2")
    # 40 epochs at 100/s; 20 of 2 models at 300/s; 10 of 4 at 500/s, decoded at 200/s
    seconds = 10_000 * (40 / 100 + 40 / 300 + 40 / 500)
    assert f"{seconds / 3600:.3g} hours on one device" in text
    assert f"{seconds / 3600 * 2:.2f}" in text
    assert "120 passes over 10,000 images; 70 decoded" in text
    found = json.loads(run(capsys, speeds, "--loader=200", "--price=2", "--json"))["hours"]
    assert found["total"] == pytest.approx(seconds / 3600)
    assert found["money"] == pytest.approx(seconds / 1800)

    apart = json.loads(run(capsys, speeds, "--loader=200", "--batches=separate", "--json"))
    slower = 10_000 * (40 / 100 + 40 / 200 + 40 / 200)
    assert apart["hours"]["total"] == pytest.approx(slower / 3600)
    # a cluster takes the same speeds
    cluster = json.loads(run(capsys, speeds, "--devices=8", "--batch-size=64", "--json"))
    assert cluster["cluster"]["scaling"]["images_per_second"] == [100, 300, 500]


@pytest.mark.parametrize(
    ("budget", "name"), [("--budget-hours=0.5", "total"), ("--budget-time=0.5", "ratio")]
)
def test_a_budget_in_hours(budget: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = [word for word in PLAN if word != "--epochs=40"]
    options = [budget, "--images-per-second=100,300,500", "--rounding=none", "--json"]
    assert main([*other, *options]) == 0
    found = json.loads(capsys.readouterr().out)["hours"]
    assert found[name] == pytest.approx(0.5)


def test_steps_auto_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    other = [word for word in PLAN if word not in ("--epochs=40", "--steps=2")]
    auto = [*other, "--steps=auto", "--budget=0.7"]
    assert main([*auto, "--images-per-second=10,9999,10"]) == 0
    text = capsys.readouterr().out
    assert "1 step takes the fewest hours" in text and "warning: 0 steps" not in text
    assert main([*auto, "--images-per-second=10"]) == 0
    text = capsys.readouterr().out
    assert "0 steps take the fewest hours" in text and "warning: 0 steps" in text
    assert main([*auto, "--images-per-second=10,9999,10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 1 and found["steps_auto"][0]["ratio"] == pytest.approx(0.7)


def test_measured_speeds_are_remembered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    measure = ["--measure", "--threads=1", "--batch-size=8", "--device=cpu"]
    first = json.loads(run(capsys, *measure, "--json"))["hours"]
    assert all(stage["images_per_second"] > 0 for stage in first["stages"])
    assert all(0 < stage["peak_share"] < 1.5 for stage in first["stages"])
    again = run(capsys, *measure)
    assert again.count(": measured before") == 3 and "--measure-again measures anew" in again
    second = json.loads(run(capsys, *measure, "--json"))["hours"]
    assert second["total"] == first["total"]
    third = json.loads(run(capsys, *measure, "--measure-again", "--json"))["hours"]
    assert third["total"] != first["total"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epochs=1e308", "the longest training of the plan, in epochs, is 1e+308"),
        ("--budget=1e308", "the longest training of the plan, in epochs, is inf"),
        ("--epochs=1 --baseline-epochs=1e300", "baseline epochs is 1e+300"),
        ("--epochs=1 --warmup-epochs=1e10", "warm-up epochs is 1e+10"),
        (f"--epochs=1 --images={10**400}", "expected a whole number from 1 to 10^15"),
    ],
)
def test_amounts_that_nobody_can_train_are_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "resnet18d", "--device=cpu", *options.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 2


def test_tokens_are_sequences_of_a_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ["plan", "gpt2", "--steps=1", "--epochs=1", "--rounding=none", "--model-kwargs"]
    words += [f"{name}={value}" for name, value in TINY_TEXT["gpt2"].items()]
    assert main([*words, "--tokens=1000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["images"] == 1000 // 16
    for tokens, message in (("15", "less than one sequence of 16"), ("-3", "less than one")):
        assert main([*words, f"--tokens={tokens}"]) == 2
        assert message in capsys.readouterr().err
    assert main([*PLAN, "--tokens=1000"]) == 2
    assert "takes images, and --tokens is for text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--price=0", "--images-per-second=9"], "--price is 0"),
        (["--price=-1", "--images-per-second=9"], "--price is -1"),
        (["--price=nan", "--images-per-second=9"], "--price got nan"),
        (["--price=2.1"], "--price needs the training speed of each level"),
        (["--loader=0", "--images-per-second=9"], "--loader is 0"),
        (["--loader=inf", "--images-per-second=9"], "--loader got inf"),
        (["--loader=9"], "--loader needs the training speed of each level"),
        (["--images-per-second=0"], "images per second is 0"),
        (["--measure", "--speeds=x.csv"], "given twice: --measure and --speeds"),
        (["--measure-again", "--images-per-second=9"], "given twice"),
        (["--speeds=missing.csv"], "missing.csv cannot be read as a table"),
        (["--measure", "--device=nonsense"], "the device 'nonsense' cannot be used"),
        (["--steps=auto"], "steps auto compares numbers of steps at the same FLOPs"),
        (["--steps=many"], "--steps got many, expected a whole number or auto"),
        (["--budget-hours=3"], "the plan was given epochs, budget hours"),
    ],
)
def test_mistakes_with_speeds_are_two_lines(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 2


def test_hours_without_speeds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = [word for word in PLAN if word != "--epochs=40"]
    for options, message in (
        (["--budget-hours=3"], "a budget in hours needs the training speed"),
        (["--budget-time=-1", "--images-per-second=9"], "budget time is -1"),
        (["--budget-hours=0", "--images-per-second=9"], "budget hours is 0"),
        (["--budget=0.7", "--steps=auto"], "--steps auto needs the training speed"),
        (["--budget-hours=0.00001", "--images-per-second=9", "--rounding=none"],
         "less than one step"),
    ):  # fmt: skip
        assert main([*other, *options]) == 2, options
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 2
