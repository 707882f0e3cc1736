"""The files beside the package: notebook, Slurm scripts, Dockerfile, workflows."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from rbdc.cli import make_parser
from tests.test_package import EXTRAS, PROJECT, ROOT, wheel

__all__ = ["wheel"]  # a fixture

SCRIPTS = sorted((ROOT / "examples/slurm").glob("*.sbatch"))
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, kernel_name="empty", timeout=120).execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_the_notebook_runs_where_nothing_is_installed(wheel: Path, tmp_path: Path) -> None:
    """As on Colab: torch is there, rbdc is not, and the wheel lies beside the notebook."""
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env/lib").glob("*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / wheel.name).symlink_to(wheel)
    kernel = tmp_path / "kernels/empty/kernel.json"
    kernel.parent.mkdir(parents=True)
    python = str(tmp_path / "env/bin/python")
    launch = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": launch, "display_name": "empty", "language": "python"}))
    # pip sees the packages of this environment, too: it must take them as they are.
    pip = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [sys.executable, "-c", EXECUTE, str(ROOT / "examples/rbdc.ipynb")]
    environment = {**clean, **pip, "JUPYTER_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    texts = [str(output) for cell in cells for output in cell.get("outputs", ())]
    assert any("top-1" in text for text in texts) and (site / "rbdc/__init__.py").exists()


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads((ROOT / "examples/rbdc.ipynb").read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert max(len(line) for cell in cells for line in cell["source"]) <= 101


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_command_lines_of_slurm_scripts_are_understood(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    commands = re.findall(r"^srun .*? ?(?:rbdc|-m rbdc\.cli) (train .*?)&?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        make_parser().parse_args(shlex.split(command))


@pytest.mark.parametrize("code", [0, 75])
def test_an_array_trains_every_model_and_requeues_what_was_stopped(
    code: int, tmp_path: Path
) -> None:
    for name, line in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/bash\necho {name} "$@"\n{line}\n')
        tool.chmod(0o755)
    text = (ROOT / "examples/slurm/array.sbatch").read_text()
    trained = []
    for last, level in re.findall(r"--array=(?:0-)?(\d) --export=ALL,LEVEL=(\d)", text):
        for task in range(int(last) + 1):
            slurm = {"LEVEL": level, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "7"}
            environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
            done = subprocess.run(
                ["bash", "-c", text], env=environment, capture_output=True, text=True
            )
            assert done.returncode == code
            assert ("scontrol requeue 7" in done.stdout) == (code == 75)
            trained += re.findall(r"--node (\S+)", done.stdout)
    assert trained == ["2.0", "2.1", "2.2", "2.3", "1.0", "1.1", "target"]


def test_the_dockerfile_copies_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {path for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
              for path in line.split()[:-1]}  # fmt: skip
    assert copied == allowed and all((ROOT / path).exists() for path in copied)
    assert PROJECT["readme"] in copied
    assert all(any(path.startswith(part) for part in copied) for path in PROJECT["license-files"])
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert re.search(r"^ARG BASE=.*\nFROM \$\{BASE\}$", text, re.MULTILINE)


def test_workflows_call_make_as_it_is() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (path,) = (ROOT / ".github/workflows").glob("*.yml")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    called = {found for step in steps for found in re.findall(r"\bmake ([\w-]+)", step)}
    assert called == {"lint", "pytest", "test-numerics", "wheel", "docs"} and called <= targets
    listed = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if ":: 3." in c}
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == listed
