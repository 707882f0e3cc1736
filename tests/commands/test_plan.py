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
